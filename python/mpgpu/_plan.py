# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plans of copies, their executions, and single copies."""

from __future__ import annotations

import copy as copies
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Callable, NamedTuple

from . import _library
from ._context import Context, default_context
from ._current import LAST_DEFAULT, LAST_HANDLE, Current, given, make_current
from ._dropped import collect, hold
from ._dropped import held as _dropped
from ._library import ENGINE, NULL, SWITCH, check, failure, ffi, lib, sized
from ._memory import Memory, Storages, memory_of
from ._names import are_alike, device_number, elements_of
from ._streams import Stream
from .errors import ArgumentError, Error
from .typing import Array, Device, StreamLike

_new = ffi.new
_cast = ffi.cast
_execute = lib.mp_execute
_wait = lib.mp_wait
_test = lib.mp_test
# C types, which are looked up once because each look-up parses the name.
_REQUEST = ffi.typeof("mp_request_t *")
_STREAM = ffi.typeof("mp_stream_t")
_INT = ffi.typeof("int32_t *")

# Time in seconds during which the main thread polls without a pause, and the longest pause after that.
_WITHOUT_PAUSE = 1e-3
_LONGEST_PAUSE = 0.5e-3
_AT_ONCE = (False,)
_NO_INFO = (NULL,)
_now = time.perf_counter
_this_thread = threading.get_ident
_main_thread = threading.main_thread().ident


def _after_fork() -> None:
    # In a child of fork, the thread that called fork is the main thread.
    global _main_thread
    _main_thread = _this_thread()


os.register_at_fork(after_in_child=_after_fork)

Pair = tuple[Array, Array]
"""Destination and source of a transfer: any objects with memory."""


class PlanInfo(NamedTuple):
    """Properties of a plan. Sizes are in bytes. Times are in seconds and are predicted by the performance model unless stated otherwise.
    ``mp_plan_info_t`` in mpgpu.h describes the fields.
    """

    predicted_seconds: float
    """Predicted time of one execution, seconds."""
    direct_seconds: float
    """Predicted time of the same transfers if each used one path, seconds."""
    bytes: int
    """Total number of bytes in all transfers."""
    paths: int
    """Total number of paths of all transfers."""
    operations: int
    """Number of operations in one execution."""
    staging_bytes: int
    """Staging memory on the device that needs most of it, bytes."""
    measured_seconds: float
    """Median time of the last measured executions with the active variant, seconds. 0 if none was measured."""
    measured_direct_seconds: float
    """Median time of the last measured executions with plain copies, seconds. 0 if none was measured."""


class Request(_library.Owner):
    """Request: an execution of a plan, or a copy of blocks, that the program can wait for.

    Keeps the plan alive, and therefore all memory that the execution needs. If the request is dropped before the execution has finished,
    mpgpu keeps the plan and the memory alive until then. The same applies to the memory of a copy of blocks. Dropping a request does not
    block. May be used from any thread.
    """

    __slots__ = ("__weakref__", "_asked", "_error", "_held", "_lock", "_request")

    def __init__(self, held: Any, request: Any) -> None:
        # This object is created before the call that fills `request`, so that an exception of a signal handler cannot lose a running
        # execution. `_held` keeps alive the resources that the execution needs. It is None after the execution has finished.
        self._held: Any = held
        self._request = request
        self._asked: Any = None
        # Copies of the error are raised. The object itself would keep the traceback's frames alive, and these keep the request alive.
        self._error: Error | None = None
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        """Blocks until the execution has finished. If the execution has failed, every call raises its error.

        Other Python threads can run meanwhile. If a signal handler raises an exception in the main thread, for example on Ctrl-C, the wait
        ends and the execution continues.
        """
        if self._held is not None:
            with self._lock:
                if self._held is not None:
                    self._wait_until_ended()
        if _dropped:
            collect(16)
        if self._error is not None:
            raise copies.copy(self._error)

    def done(self) -> bool:
        """Returns true if the execution has finished. Does not block. If the execution has failed, raises its error."""
        if not self._has_ended():
            return False
        if self._error is not None:
            raise copies.copy(self._error)
        return True

    def _has_ended(self) -> bool:
        if self._held is None:
            return True
        acquired: list[bool] = []
        try:
            # `map` is used for the reason given in `_ask`. If another thread waits for the execution, that thread holds the lock.
            acquired.extend(map(self._lock.acquire, _AT_ONCE))
            return acquired[0] and (self._held is None or self._ask())
        finally:
            if acquired and acquired[0]:
                self._lock.release()

    # The caller of the following functions holds the lock.
    def _wait_until_ended(self) -> None:
        if _this_thread() != _main_thread:
            if self._asked is None:
                self._prepare()
            elif self._ask():
                return
            self._finished(self._wait_now())
            return
        # A blocking call would delay signal handlers, which Python runs only in the main thread.
        if self._ask():
            return
        started = now = _now()
        while not self._ask():
            if now - started < _WITHOUT_PAUSE:
                # On the host backend, threads of these processes copy the data and need the CPU.
                os.sched_yield()
            else:
                time.sleep(min((now - started) / 64, _LONGEST_PAUSE))
            now = _now()

    def _wait_now(self) -> int:
        status: int = _wait(self._request, NULL)
        return status

    def _question(self, done: Any) -> tuple[Any, ...]:
        """Returns the function that checks whether the execution has ended, and its arguments, each in a tuple."""
        return _test, (self._request,), (done,), _NO_INFO

    def _prepare(self) -> None:
        done = _new(_INT)
        self._asked = ([], done, self._question(done))

    def _ask(self) -> bool:
        """Checks whether the execution has ended. Stores its error."""
        if self._asked is None:
            self._prepare()
        statuses, done, call = self._asked
        if not statuses:
            # A signal handler may raise an exception as soon as the C function returns. The status would then be lost, but the function has
            # already destroyed the request. With `map` no handler runs before the status is in the list.
            statuses.extend(map(*call))
        status = statuses[0]
        if status == 0 and not done[0]:
            statuses.clear()
            return False
        self._finished(status)
        return True

    def _finished(self, status: int) -> None:
        if status:
            self._error = self._failure(status)
        # This must be the last step: if a signal handler interrupts the steps above, they are repeated.
        self._held = None

    def _failure(self, status: int) -> Error:
        return failure(status)

    def __del__(self) -> None:
        if getattr(self, "_held", None) is not None:
            hold(self._request, self._held)

    def __repr__(self) -> str:
        return f"<mpgpu.Request: {'finished' if self._held is None else 'not waited for'}>"


def _options(
    engine: str | None,
    max_paths: int | None,
    host_path: bool | None,
    chunk_bytes: int | None,
    min_bytes: int | None,
    staging_bytes: int | None,
    relay_gpus: Iterable[Device] | None,
    adapt: bool | None = None,
    relay_chunks: int | None = None,
    host_chunks: int | None = None,
) -> Any:
    options = sized("mp_plan_options_t *")
    options.engine = _library.choice("engine", ENGINE, engine)
    options.max_paths = _library.option("max_paths", max_paths, 2**32 - 1)
    options.host_path = _library.choice("host_path", SWITCH, host_path)
    options.chunk_bytes = _library.option("chunk_bytes", chunk_bytes)
    options.min_bytes = _library.option("min_bytes", min_bytes)
    options.staging_bytes = _library.option("staging_bytes", staging_bytes)
    options.adapt = _library.choice("adapt", SWITCH, adapt)
    options.relay_chunks = _library.option("relay_chunks", relay_chunks, 2**32 - 1)
    options.host_chunks = _library.option("host_chunks", host_chunks, 2**32 - 1)
    if relay_gpus is not None:
        options.relay_gpus = sum({1 << _relay(gpu) for gpu in relay_gpus}) or lib.MP_RELAY_NONE
    return options


def _relay(gpu: Device) -> int:
    return _library.number("relay_gpus", gpu if isinstance(gpu, int) else device_number(gpu, "relay_gpus"), 62)


def _check_elements(index: int, dst: Any, dst_memory: Memory, src: Any, src_memory: Memory) -> None:
    """Raises if source and destination of a copy have different element types or shapes."""
    if not dst_memory.nbytes or are_alike(dst, src):
        return
    into, of = elements_of(dst, dst_memory.elements), elements_of(src, src_memory.elements)
    if into is not None and of is not None and into != of:
        raise ArgumentError(
            f"transfer {index}: dst is {into[0]} of shape {into[1]} and src {of[0]} of shape {of[1]}: convert or reshape one of them, or "
            "pass as_bytes=True to copy the bytes as they are"
        )


def _context_of(memories: Iterable[Memory], context: Context | None) -> Context:
    """Returns the context to use: the given one, otherwise that of the memory, otherwise the default context."""
    for memory in memories:
        if memory.context is not None:
            if context is None:
                context = memory.context
            elif context is not memory.context:
                raise ArgumentError(
                    "the memory of a buffer belongs to another context: allocate it with the one that plans, or pass context="
                )
    return context if context is not None else default_context()


def _check_memory(context: Context, memory: Memory, name: str) -> None:
    if memory.on_gpu and memory.context is None and context._backend == "host":
        raise ArgumentError(
            f"{name} is memory of a GPU, and the context runs on the host backend: unset MPGPU_BACKEND or use Context('cuda')"
        )


class Plan(_library.Owner):
    """Plan: a prepared batch of copies. It is created once and executed any number of times.

    ``Plan([(dst, src), …])`` copies all bytes of each ``src`` into its ``dst``. Both must have the same type and shape. Raw bytes, for
    example from :func:`empty` without a type, have neither and match every type and shape. The copies run in no particular order. No
    destination may overlap another destination or a source. The plan keeps the memory of all its arrays alive. Each execution copies their
    current contents.

    Args:
        transfers: pairs (destination, source) of objects with ``__dlpack__``, ``__cuda_array_interface__``, ``__array_interface__`` or the
            buffer protocol.
        context: the context that executes the copies. By default it is the context of the :class:`Buffer` objects among the transfers,
            otherwise :func:`default_context`.
        as_bytes: True if source and destination may differ in type and shape. Their sizes must still be equal.
        engine: mechanism by which the plan is executed: ``"stream"``, ``"graph"``, ``"batch"`` or ``"kernel"``. ``None`` selects the one
            with the shortest predicted time.
        max_paths: maximum number of paths over which one transfer is distributed. With 1 all copies are direct.
        host_path: True if copies between GPUs may use a path through host memory.
        chunk_bytes: chunk size on paths with staging memory (through another GPU or host memory) in bytes, at least 4096.
        relay_chunks, host_chunks: number of chunks on each path through another GPU, and on each path through host memory. They override
            ``chunk_bytes``.
        min_bytes: transfer size in bytes below which a transfer uses only one path.
        staging_bytes: maximum size of the staging memory on each device, bytes.
        relay_gpus: the GPUs through which data of other GPUs may be forwarded; ``()`` for none, ``None`` for all.
        adapt: True (the default) if executions measure variants of the plan and then use the fastest. The variants are: all paths; all
            paths, but with half as much data on the indirect ones; only direct paths.

    Raises:
        ArgumentError: memory is not contiguous, is read-only or overlaps; sizes, types or shapes differ; or an option is invalid. The
            message contains the index of the transfer.
        TypeError: an object has no memory.
        NotSupported: no path connects two devices.
        OutOfMemory: a device or the host has no more memory.

    May be used from several threads concurrently. Planning blocks for a few microseconds. Planning the same copies again takes only a
    look-up.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_currents",
        "_device",
        "_events",
        "_handle",
        "_is_on_gpus",
        "_keep",
        "_lock",
        "_own",
        "_single",
        "_storages",
    )

    def __init__(
        self,
        transfers: Iterable[Pair],
        *,
        context: Context | None = None,
        as_bytes: bool = False,
        engine: str | None = None,
        max_paths: int | None = None,
        host_path: bool | None = None,
        chunk_bytes: int | None = None,
        min_bytes: int | None = None,
        staging_bytes: int | None = None,
        relay_gpus: Iterable[Device] | None = None,
        adapt: bool | None = None,
        relay_chunks: int | None = None,
        host_chunks: int | None = None,
    ) -> None:
        self._handle = NULL
        pairs: list[tuple[Memory, Memory]] = []
        for index, pair in enumerate(transfers):
            try:
                dst, src = pair
            except (TypeError, ValueError):
                raise TypeError(f"transfer {index} is a {type(pair).__name__}: it must be a pair (dst, src)") from None
            dst_memory, src_memory = memory_of(dst, f"dst of transfer {index}", True), memory_of(src, f"src of transfer {index}")
            if dst_memory.nbytes != src_memory.nbytes:
                raise ArgumentError(
                    f"transfer {index}: dst has {dst_memory.nbytes} bytes and src {src_memory.nbytes}: they must have the same size"
                )
            if dst_memory.readonly:
                raise ArgumentError(f"dst of transfer {index} is read-only: copy into memory that may be written")
            if not as_bytes:
                _check_elements(index, dst, dst_memory, src, src_memory)
            pairs.append((dst_memory, src_memory))
        memories = [memory for pair in pairs for memory in pair]
        context = _context_of(memories, context)
        collect(16)
        array = ffi.new("mp_transfer_t[]", len(pairs))
        for index, (into, of) in enumerate(pairs):
            _check_memory(context, into, f"dst of transfer {index}")
            _check_memory(context, of, f"src of transfer {index}")
            transfer = array[index]
            transfer.dst = into.pointer
            transfer.dst_device = into.device
            transfer.src = of.pointer
            transfer.src_device = of.device
            transfer.bytes = into.nbytes
        options = _options(
            engine, max_paths, host_path, chunk_bytes, min_bytes, staging_bytes, relay_gpus, adapt, relay_chunks, host_chunks
        )
        made = ffi.new("mp_plan_t *")
        check(lib.mp_plan(context._handle, array, len(pairs), options, made))
        self._own_plan(context, made[0], memories)

    def _own_plan(self, context: Context, handle: Any, memories: Sequence[Memory]) -> None:
        """Takes ownership of a plan of the library. Determines the streams that the frameworks use for its arrays."""
        self._context = context
        self._events: list[Any] = []
        self._handle = handle
        self._keep = [memory.keep for memory in memories]
        self._storages = Storages(memories)
        # True if all sources and destinations are in GPU memory. Host memory may be accessed without a stream.
        self._is_on_gpus = all(memory.on_gpu for memory in memories)
        currents: dict[object, Current] = {}
        for memory in memories:
            current = memory.current
            if current is None or context._backend != "cuda":
                continue
            if memory.settle:
                stream = current.handle()
                with _entered(current.here(stream)):
                    check(lib.mp_stream_synchronize(context._handle, _cast(_STREAM, stream)))
            currents.setdefault(current.key, current)
        # The plan runs in the first stream, and the other streams wait for it. Streams of frameworks that order their later work come
        # first.
        self._currents = tuple(sorted(currents.values(), key=lambda current: not current.is_known))
        self._single = self._currents[0] if len(self._currents) == 1 else None
        self._device = next(
            (memory.device for memory in memories if 0 <= memory.device < context.gpus), 0 if context.gpus else _library.HOST
        )
        # Stream for executions without the argument `stream`, as soon as it is known.
        self._own: Any = None
        self._lock = threading.Lock()

    def __del__(self, destroy: Any = lib.mp_plan_destroy) -> None:
        # If the constructor rejected its arguments, there is no handle.
        if getattr(self, "_handle", NULL) != NULL:
            for event in self._events:
                lib.mp_event_destroy(self._context._handle, event)
            destroy(self._handle)

    @property
    def context(self) -> Context:
        """Context that executes the plan."""
        return self._context

    def execute(self, stream: StreamLike | None = None) -> Request:
        """Enqueues one execution of the plan, after all earlier work in the stream and before all later work. Does not block.

        Args:
            stream: a torch, CuPy or mpgpu stream, an object with ``__cuda_stream__``, or a stream handle as a number (0 is the default
                stream of the current GPU). ``None`` selects the current torch or CuPy stream, if the transfers contain torch or CuPy arrays
                in GPU memory. If these arrays are on several GPUs or from both frameworks, the execution is ordered with all of their
                current streams: after their earlier work and before their later work. If there are no such arrays, ``None`` selects mpgpu's
                own stream, which runs executions in order. The program must then wait for the returned request.

        Raises:
            ArgumentError: the stream is invalid, or memory was freed, for example by torch's ``storage.resize_``.
            NotSupported: the stream is being captured, and the execution cannot be captured.
        """
        if _dropped:
            # Each execution adds at most one dropped request, and up to two are released here. A time loop that drops its requests
            # therefore accumulates only those in flight, and few of them are checked.
            collect(2)
        if stream is None:
            if self._own is None:
                return self._execute_in_current()
            handle = self._own
        elif type(stream) is Stream:
            if stream._context is not self._context:
                # On the host backend, streams of two contexts may have equal handles.
                raise ArgumentError("the stream is not a stream of this context: make it with the context that plans", argument="stream")
            handle = stream._handle
        elif type(stream) is int and 0 <= stream <= LAST_HANDLE:
            handle = _cast(_STREAM, stream)
        else:
            number, device = given(stream)
            handle = _cast(_STREAM, number)
            if device is not None:
                with make_current(device):
                    return self._begin(handle)
        return self._begin(handle)

    def _begin(self, handle: Any) -> Request:
        if self._storages.asked:
            self._storages.check()
        request = _new(_REQUEST)
        made = Request(self, request)
        status = _execute(self._handle, handle, request)
        if status:
            made._held = None
            raise failure(status)
        return made

    def _execute_in_current(self) -> Request:
        current = self._single
        if current is None:
            if not self._currents:
                self._own = self._context._own_stream(self._device)
                return self.execute(self._own_stream_number())
            with self._lock:
                return self._execute_in_all()
        number = current.handle()
        here = current.here(number) if number <= LAST_DEFAULT else None
        if here is None:
            return self._begin(_cast(_STREAM, number))
        with here:
            return self._begin(_cast(_STREAM, number))

    def _own_stream_number(self) -> int:
        return int(_cast("uintptr_t", self._own))

    def _execute_in_all(self) -> Request:
        """Executes the plan in the current streams of all frameworks. The caller holds the lock, because the events are shared."""
        return enqueue_in_all(self._context, self._currents, self._events, self._begin)

    def prepare(self, stream: StreamLike | None = None) -> None:
        """Performs the one-time setup for executions in ``stream``, so that the first execution takes no longer than later ones. Copies no
        data.
        """
        if stream is not None:
            number, device = given(stream)
            here = make_current(device) if device is not None else None
        elif self._currents:
            number = self._currents[0].handle()
            here = self._currents[0].here(number)
        else:
            number, here = int(_cast("uintptr_t", self._context._own_stream(self._device))), None
        with _entered(here):
            check(lib.mp_plan_prepare(self._handle, _cast(_STREAM, number)))

    def describe(self) -> str:
        """Returns a description of the plan as text: the paths, the size of the data and of the chunks on each path, the staging memory,
        the predicted time, and why other paths were rejected.
        """
        return _library.text_of(lib.mp_plan_describe, self._handle, lib.MP_FORMAT_TEXT)

    def describe_json(self) -> dict[str, Any]:
        """Returns the description of :meth:`describe` as a dict."""
        return _library.json_of(_library.text_of(lib.mp_plan_describe, self._handle, lib.MP_FORMAT_JSON))

    @property
    def info(self) -> PlanInfo:
        """Properties of the plan, for example its predicted time."""
        found = sized("mp_plan_info_t *")
        check(lib.mp_plan_get_info(self._handle, found))
        return PlanInfo(*(getattr(found, name) for name in PlanInfo._fields))

    def __repr__(self) -> str:
        info = self.info
        return f"<mpgpu.{type(self).__name__}: {info.bytes} bytes over {info.paths} paths>"


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


def _entered(here: AbstractContextManager[Any] | None) -> AbstractContextManager[Any]:
    return here if here is not None else _NOTHING


def enqueue_in_all(context: Context, currents: Sequence[Current], events: list[Any], begin: Callable[[Any], Request]) -> Request:
    """Enqueues work after earlier and before later work in several streams. ``begin`` enqueues it in the stream that it is passed, the
    first of ``currents``. Missing events are created and added to ``events``; no other call may use the events meanwhile.
    """
    streams = [(current, _cast(_STREAM, current.handle())) for current in currents]
    while len(events) < len(streams):
        event = _new("mp_event_t *")
        check(lib.mp_event_create(context._handle, event))
        events.append(event[0])
    (first, main), others = streams[0], streams[1:]

    def on(current: Current, stream: Any) -> AbstractContextManager[Any]:
        return _entered(current.here(int(_cast("uintptr_t", stream))))

    for event, (current, stream) in zip(events[1:], others):
        with on(current, stream):
            check(lib.mp_event_record(context._handle, event, stream))
    with on(first, main):
        for event in events[1:]:
            check(lib.mp_stream_wait_event(context._handle, main, event))
        made = begin(main)
        check(lib.mp_event_record(context._handle, events[0], main))
    for current, stream in others:
        with on(current, stream):
            check(lib.mp_stream_wait_event(context._handle, stream, events[0]))
    return made


def copy(dst: Array, src: Array, stream: StreamLike | None = None, *, context: Context | None = None, as_bytes: bool = False) -> Request:
    """Copies all bytes of ``src`` into ``dst``. Both must have the same type and shape.

    If ``stream`` is given, the copy is enqueued in that stream and may still run on return. If ``stream`` is ``None`` and both arrays are
    torch or CuPy arrays in GPU memory, the copy is enqueued in their current stream and may still run on return. In all other cases the
    copy has finished on return.

    Args:
        dst: the destination, an object with ``__dlpack__``, ``__cuda_array_interface__``, ``__array_interface__`` or the buffer protocol.
        src: the source, an object of the same kind.
        stream: the stream in which the copy runs, in any form that :meth:`Plan.execute` accepts.
        context: the context that executes the copy. The default is that of :class:`Plan`.
        as_bytes: True if ``dst`` may differ from ``src`` in type and shape. The sizes must still be equal.

    Errors are those of :class:`Plan` and :meth:`Plan.execute`.
    """
    return copy_planned(Plan([(dst, src)], context=context, as_bytes=as_bytes), stream)


def copy_planned(plan: Plan, stream: StreamLike | None) -> Request:
    """Executes a plan that is used once. Blocks until the execution has finished, unless a stream of the caller orders the execution."""
    request = plan.execute(stream)
    if stream is None and not (plan._is_on_gpus and plan._currents and plan._currents[-1].is_known):
        request.synchronize()
    return request
