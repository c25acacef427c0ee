# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages between the ranks of a node: messengers (messages with tags) and channels (messages in order, without tags)."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import threading
import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _library
from ._context import Context
from ._current import LAST_DEFAULT, given, make_current
from ._dropped import collect, hold
from ._dropped import held as _dropped
from ._library import NULL, check, failure, ffi, lib, sized
from ._loop import all_called, awaited
from ._memory import Memory, memory_of
from ._node import Node
from ._plan import Request, _check_memory, _entered
from ._streams import Stream
from .errors import ArgumentError, Error, MessageTruncated
from .typing import Array, StreamLike

ANY: int = lib.MP_ANY_RANK
"""Value that stands for any rank or any tag."""

# Bit that only the tags of channels have.
_CHANNEL = 1 << 63
_ALL_BITS = 2**64 - 1

_new = ffi.new
_cast = ffi.cast
_send = lib.mp_send
_receive = lib.mp_receive
_test = lib.mp_test
_new_lock = threading.Lock
_REQUEST = ffi.typeof("mp_request_t *")
_STREAM = ffi.typeof("mp_stream_t")
_INT = ffi.typeof("int32_t *")
_INFO = ffi.typeof("mp_message_info_t *")
_DESCRIPTOR = ffi.typeof("mp_message_descriptor_t *")
_INFO_BYTES = ffi.sizeof("mp_message_info_t")
_METADATA = ffi.typeof(f"char[{lib.MP_MESSAGE_METADATA_BYTES}]")


def _new_info(metadata: Any = None) -> Any:
    """Returns the C struct into which the library writes the properties of a message. ``metadata`` is separate memory, which the caller
    keeps alive.
    """
    info = _new(_INFO)
    info.size = _INFO_BYTES
    if metadata is not None:
        info.metadata, info.metadata_capacity = metadata, lib.MP_MESSAGE_METADATA_BYTES
    return info


class MessageInfo(NamedTuple):
    """Properties of a received message: source rank, tag, size and metadata."""

    rank: int
    """Rank that sent the message."""
    tag: int
    """Tag of the message. For a message sent through a channel, it is a number that the package chooses."""
    bytes: int
    """Size of the message without metadata, bytes."""
    metadata: builtins.bytes
    """Metadata of the message; empty for channels."""


class Message(Request):
    """Request for a send or a receive. ``await`` it, or call :meth:`synchronize`. Channels and messengers create it.

    Awaiting polls for a few microseconds and then yields to the event loop. Many messages may be awaited concurrently. If a task is
    cancelled while it awaits, the message is cancelled. If the message has already matched, the task first waits until its data have
    arrived. The caller may then reuse the memory.

    May be used from any thread. Keeps the memory and the messenger alive. If the request of a send is dropped, the send continues. If the
    request of a receive is dropped before it has matched, the receive is cancelled.
    """

    __slots__ = ("_called_in", "_info", "_is_receive", "_metadata")

    def __init__(self, held: object, request: Any, is_receive: bool, has_metadata: bool = False) -> None:
        # The constructor of the base class is not called, because a send must be fast.
        self._held, self._request, self._asked, self._error, self._lock = held, request, None, None, _new_lock()
        self._is_receive = is_receive
        # Event loop that a callback of the library notifies when the message has ended.
        self._called_in: object = None
        self._info: Any = None
        self._metadata: Any = _new(_METADATA) if has_metadata else None

    def synchronize(self) -> MessageInfo | None:  # type: ignore[override]
        """Blocks until the message of a receive has arrived, or until the memory of a send may be reused. Other Python threads can run
        meanwhile.

        Returns:
            The properties of the message for a receive; ``None`` for a send.

        Raises:
            MessageTruncated: the message is longer than the buffer. The message is not lost: the next matching receive gets it.
            PeerGone: the other rank has exited or has destroyed its messenger.
            Cancelled: the message was cancelled, or its messenger was destroyed.

        In the main thread it also raises exceptions that a signal handler raises, for example on Ctrl-C. The message then continues, and
        this method may be called again.
        """
        super().synchronize()
        return self.info

    def __await__(self) -> Generator[Any, None, MessageInfo | None]:
        if not self._has_ended():
            yield from awaited(self)
        # The message has ended, but another thread may not have stored this yet.
        Request.synchronize(self)
        return self.info

    @property
    def info(self) -> MessageInfo | None:
        """Properties of the message that a receive has matched. ``None`` if it has not matched yet."""
        if not self._is_receive:
            return None
        if self._info is None:
            self._look()
        found = self._info
        if found is None:
            return None
        metadata = b"" if self._metadata is None else bytes(ffi.buffer(self._metadata, found.metadata_bytes))
        return MessageInfo(found.rank, found.tag & ~_CHANNEL, found.bytes, metadata)

    def cancel(self) -> bool:
        """Tries to cancel the message, and returns true if it was cancelled. Only a message that has not matched can be cancelled. Waiting
        for it then raises :class:`Cancelled`.
        """
        cancelled = _new(_INT)
        self._check_unless_ended(lib.mp_request_cancel(self._request[0], cancelled))
        return bool(cancelled[0])

    def wait(self, stream: StreamLike | None = None) -> None:
        """Makes all work that is enqueued in a stream from now on wait for the message. That work sees the received data, and may overwrite
        the sent data. Does not block.

        ``stream`` has the same meaning as for :meth:`Messenger.send`. If the message fails, the stream continues nevertheless, and
        :meth:`synchronize` raises the error.
        """
        held = self._held
        if held is not None:
            messenger, memory = held
            handle, here = _place(messenger._context, memory, stream, settles=False)
            with _entered(here):
                self._check_unless_ended(lib.mp_stream_wait_request(handle, self._request[0]))

    # A thread that waits for the request holds the lock. The following functions do not acquire it, so the request may have ended.
    @staticmethod
    def _check_unless_ended(status: int) -> None:
        if status and status != lib.MP_ERROR_INVALID_HANDLE:
            raise failure(status)

    def _look(self) -> None:
        """Stores the properties of the message that a receive has matched, if it has matched."""
        info, matched = _new_info(self._metadata), _new(_INT)
        self._check_unless_ended(lib.mp_message_get_info(self._request[0], matched, info))
        if matched[0]:
            self._info = info

    def _set_callback(self, function: Any, user: Any) -> bool:
        """Requests a callback from the library when the message has ended. Returns true if there will be a callback."""
        status = lib.mp_request_set_callback(self._request[0], function, user)
        self._check_unless_ended(status)
        return not status

    def _wait_now(self) -> int:
        status: int = lib.mp_wait(self._request, self._info_asked())
        return status

    def _question(self, done: Any) -> tuple[Any, ...]:
        return _test, (self._request,), (done,), (_new_info(self._metadata) if self._is_receive else NULL,)

    def _info_asked(self) -> Any:
        return self._asked[2][3][0]

    def _finished(self, status: int) -> None:
        if self._is_receive and (status == 0 or status == lib.MP_ERROR_MESSAGE_TRUNCATED):
            self._info = self._info_asked()
        super()._finished(status)

    def _failure(self, status: int) -> Error:
        error = failure(status)
        if isinstance(error, MessageTruncated) and self._info is not None:
            error.bytes = self._info.bytes
        return error

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:
            if self._is_receive and self._request[0] != NULL:
                # Cancel the receive, because the program could not detect its end.
                lib.mp_request_cancel(self._request[0], _new(_INT))
            hold(self._request, held)

    def __repr__(self) -> str:
        kind = "receive" if self._is_receive else "send"
        return f"<mpgpu.Message: {kind}, {'finished' if self._held is None else 'under way'}>"


class Receive(Message):
    """Request for a receive. Its result is the properties of the received message."""

    __slots__ = ()

    if TYPE_CHECKING:

        def synchronize(self) -> MessageInfo: ...  # type: ignore[override]

        def __await__(self) -> Generator[Any, None, MessageInfo]: ...


def _place(
    context: Context, memory: Memory, stream: StreamLike | None, settles: bool = True
) -> tuple[Any, AbstractContextManager[Any] | None]:
    """Returns the stream in which a message is sent or received, and the context manager that must be entered before. If necessary, waits
    for the work of the memory's producer in that stream.
    """
    if stream is None:
        current = memory.current
        if current is None or context._backend != "cuda":
            return context._own_stream(memory.device if 0 <= memory.device < context.gpus else (0 if context.gpus else _library.HOST)), None
        number = current.handle()
        here = current.here(number) if number <= LAST_DEFAULT else None
        if settles and memory.settle:
            with _entered(here):
                check(lib.mp_stream_synchronize(context._handle, _cast(_STREAM, number)))
        return _cast(_STREAM, number), here
    if type(stream) is Stream:
        if stream._context is not context:
            raise ArgumentError(
                "the stream is not a stream of this context: create it with the context of the node object", argument="stream"
            )
        return stream._handle, None
    number, device = given(stream)
    return _cast(_STREAM, number), make_current(device) if device is not None else None


class Messenger(_library.Owner):
    """Messenger: object through which one rank exchanges messages with tags with the other ranks of a node. Messages match as in MPI.

    All ranks create it together, with equal options. Messages from one rank to another do not overtake each other: a receive gets the first
    message that it matches. Messages of different messengers never match. When the last reference to the messenger and its messages is
    dropped, the other ranks are notified that this rank has left.

    Args:
        node: the node of the ranks.
        operations: maximum number of sends of one rank that are not yet received, and maximum number of receives of one rank that have not
            ended. ``None`` selects 1024.
        messages: maximum number of messages of one rank that wait for receives of one other rank. ``None`` selects 4096.

    Raises:
        The exceptions of :class:`Node`.
    """

    __slots__ = ("__weakref__", "_channels", "_context", "_handle", "_lock", "_node", "rank", "ranks")

    def __init__(self, node: Node, *, operations: int | None = None, messages: int | None = None) -> None:
        self._handle = NULL
        options = sized("mp_messenger_options_t *")
        try:
            options.operations = _library.option("operations", operations, 2**32 - 1)
            options.messages = _library.option("messages", messages, 2**32 - 1)
        except BaseException as error:
            node._tell(error)
            raise
        made = ffi.new("mp_messenger_t *")
        node._check(lib.mp_messenger_create(node._handle, options, made))
        self._handle = made[0]
        self._context = node.context
        self.rank, self.ranks = node.rank, node.ranks
        # Number of channels that were created to each rank.
        self._channels: dict[int, int] = {}
        self._lock = threading.Lock()
        _open.add(self)
        _end_with_child()

    def __del__(self, destroy: Any = lib.mp_messenger_destroy) -> None:
        # If the constructor rejected its arguments, there is no handle.
        if getattr(self, "_handle", NULL) != NULL:
            destroy(self._handle)

    @property
    def context(self) -> Context:
        """Context of the calling rank."""
        return self._context

    def send(self, x: Array, rank: int, tag: int = 0, stream: StreamLike | None = None, *, metadata: bytes = b"") -> Message:
        """Sends the whole memory of ``x`` to rank ``rank``. Does not block.

        Args:
            x: any object with memory that :class:`Plan` accepts. It must stay unchanged until the message has ended.
            rank: the receiving rank. It may be the calling rank.
            tag: the tag with which a receive matches the message, below 2**63.
            stream: the stream whose earlier work writes ``x``, in any form that :meth:`Plan.execute` accepts. ``None`` selects the current
                torch or CuPy stream if ``x`` is a torch or CuPy array in GPU memory, otherwise mpgpu's own stream for the device.
            metadata: up to 256 bytes that arrive with the message; any object with the buffer protocol.

        Raises:
            ArgumentError: an argument is invalid.
            PeerGone: the other rank has exited or has destroyed its messenger.
            QueueFull: too many sends of this rank have not been received. Nothing was sent.
        """
        rank, tag = _library.number("rank", rank, self.ranks - 1), _library.number("tag", tag, _CHANNEL - 1)
        if type(metadata) is not bytes:
            try:
                metadata = bytes(memoryview(metadata))
            except TypeError:
                raise TypeError(f"metadata is a {type(metadata).__name__}: it must be bytes") from None
        return self._send(x, rank, tag, stream, metadata)

    def receive(self, x: Array, rank: int = ANY, tag: int = ANY, stream: StreamLike | None = None, *, mask: int = _CHANNEL - 1) -> Receive:
        """Receives a message into ``x``, after earlier work in ``stream``. Does not block. If the message is shorter than ``x``, the rest
        of ``x`` is unchanged.

        Args:
            x: writable memory, at least as large as the message.
            rank: the sending rank, or ``ANY`` for any rank.
            tag: the tag, or ``ANY`` for any tag.
            stream: the stream that orders the receive: ``x`` is written after earlier work in this stream. ``None`` has the same meaning as
                for :meth:`send`.
            mask: the bits of the tag that must be equal.

        Raises:
            The exceptions of :meth:`send`.
        """
        tag, mask = _tags(tag, mask)
        return self._receive(x, self._rank(rank), tag, mask, stream, True)

    def probe(self, rank: int = ANY, tag: int = ANY, *, mask: int = _CHANNEL - 1) -> MessageInfo | None:
        """Returns the properties of the message that a receive with these arguments would get now, without receiving it. Returns ``None``
        if there is no such message. Does not block.

        Args:
            rank, tag, mask: arguments with the same meaning as for :meth:`receive`.
        """
        tag, mask = _tags(tag, mask)
        found, metadata = _new(_INT), _new(_METADATA)
        info = _new_info(metadata)
        check(lib.mp_message_probe(self._handle, self._rank(rank), tag, mask, found, info))
        if not found[0]:
            return None
        return MessageInfo(info.rank, info.tag, info.bytes, bytes(ffi.buffer(metadata, info.metadata_bytes)))

    def _send(self, x: Array, rank: int, tag: int, stream: StreamLike | None, metadata: builtins.bytes) -> Message:
        memory = memory_of(x, "x")
        context = self._context
        if memory.context is not context:
            _check_owner(context, memory)
        handle, here = _place(context, memory, stream)
        if _dropped:
            collect(2)
        request = _new(_REQUEST)
        message = Message((self, memory), request, False)
        data, size = memory.pointer, len(metadata)
        if here is None:
            status = _send(self._handle, data, memory.nbytes, rank, tag, metadata or NULL, size, handle, request)
        else:
            with here:
                status = _send(self._handle, data, memory.nbytes, rank, tag, metadata or NULL, size, handle, request)
        if status:
            message._held = None
            raise failure(status)
        return message

    def _receive(self, x: Array, rank: int, tag: int, mask: int, stream: StreamLike | None, has_metadata: bool) -> Receive:
        memory = memory_of(x, "x", True)
        context = self._context
        if memory.context is not context:
            _check_owner(context, memory)
        if memory.readonly:
            raise ArgumentError("x is read-only: receive into memory that may be written", argument="x")
        handle, here = _place(context, memory, stream)
        if _dropped:
            collect(2)
        request = _new(_REQUEST)
        message = Receive((self, memory), request, True, has_metadata)
        data = memory.pointer
        if here is None:
            status = _receive(self._handle, data, memory.nbytes, rank, tag, mask, handle, request)
        else:
            with here:
                status = _receive(self._handle, data, memory.nbytes, rank, tag, mask, handle, request)
        if status:
            message._held = None
            raise failure(status)
        return message

    def _describe(self, x: Array, stream: StreamLike | None) -> tuple[bytes, int, Message]:
        """Returns a descriptor with which another rank fetches ``x``, the size of ``x``, and a request that ends after the fetch."""
        memory = memory_of(x, "x")
        _check_owner(self._context, memory)
        handle, here = _place(self._context, memory, stream)
        request, descriptor = _new(_REQUEST), _new(_DESCRIPTOR)
        message = Message((self, memory), request, False)
        with _entered(here):
            status = lib.mp_message_describe(self._handle, memory.pointer, memory.nbytes, handle, descriptor, request)
        if status:
            message._held = None
            raise failure(status)
        return bytes(ffi.buffer(descriptor)), memory.nbytes, message

    def _fetch(self, descriptor: bytes, x: Array, stream: StreamLike | None) -> Receive:
        memory = memory_of(x, "x", True)
        _check_owner(self._context, memory)
        if memory.readonly:
            raise ArgumentError("x is read-only: receive into memory that may be written", argument="x")
        handle, here = _place(self._context, memory, stream)
        request, of = _new(_REQUEST), _new(_DESCRIPTOR)
        ffi.memmove(of, descriptor, len(descriptor))
        message = Receive((self, memory), request, True)
        with _entered(here):
            status = lib.mp_message_fetch(self._handle, of, memory.pointer, memory.nbytes, handle, request)
        if status:
            message._held = None
            raise failure(status)
        return message

    def _rank(self, rank: int) -> int:
        return rank if rank == ANY else _library.number("rank", rank, self.ranks - 1)

    def __repr__(self) -> str:
        return f"<mpgpu.Messenger: rank {self.rank} of {self.ranks}>"


def _check_owner(context: Context, memory: Memory) -> None:
    if memory.context is context:
        return
    if memory.context is not None:
        raise ArgumentError("the memory of x belongs to another context: allocate it with the context of the node object", argument="x")
    _check_memory(context, memory, "x")


def _tags(tag: int, mask: int) -> tuple[int, int]:
    """Returns the tag and the mask to pass to the library. They never match the tags of channels."""
    mask = _library.number("mask", mask, _CHANNEL - 1)
    return (0, _CHANNEL) if tag == ANY else (_library.number("tag", tag, _CHANNEL - 1), mask | _CHANNEL)


class Channel(_library.Owner):
    """Channel: sends messages, in order and without tags, between this rank and another rank or within this rank.

        channel = mpgpu.Channel(node, rank)
        await channel.send(x)
        await channel.receive(y)                  # or .synchronize() instead of await

    The first channel that a rank creates to another rank is connected to the first channel that the other rank creates to it, the second to
    the second, and so on. If ``rank`` is the calling rank, the channel receives the messages that it sends.

    Args:
        messenger: the messenger that sends the messages. If it is a :class:`Node`, the node's own messenger is used. All ranks create that
            messenger together when they create their first channel.
        rank: the other rank.
    """

    __slots__ = ("_messenger", "_tag", "rank")

    def __init__(self, messenger: Messenger | Node, rank: int) -> None:
        if isinstance(messenger, Node):
            messenger = _of_node(messenger)
        rank = _library.number("rank", rank)
        if rank >= messenger.ranks:
            raise ArgumentError(f"rank={rank}: must be below {messenger.ranks}, the number of ranks", argument="rank")
        self._messenger = messenger
        self.rank = rank
        with messenger._lock:
            number = messenger._channels.get(rank, 0)
            messenger._channels[rank] = number + 1
        self._tag = _CHANNEL | number

    def send(self, x: Array, stream: StreamLike | None = None) -> Message:
        """Sends the whole memory of ``x`` to the other rank. Does not block. ``await`` the result, or call its ``synchronize()``, before
        you overwrite ``x``. Arguments and errors are those of :meth:`Messenger.send`.
        """
        return self._messenger._send(x, self.rank, self._tag, stream, b"")

    def receive(self, x: Array, stream: StreamLike | None = None) -> Receive:
        """Receives the next message from the other rank into ``x``. Does not block. ``await`` the result, or call its ``synchronize()``,
        before you read ``x``. Arguments and errors are those of :meth:`Messenger.receive`.
        """
        return self._messenger._receive(x, self.rank, self._tag, _ALL_BITS, stream, False)

    def __repr__(self) -> str:
        return f"<mpgpu.Channel: rank {self._messenger.rank} to {self.rank}, number {self._tag & ~_CHANNEL}>"


def _of_node(node: Node) -> Messenger:
    """Returns the messenger that the channels of a node use. Creates it at the first call."""
    with node._lock:
        made: Messenger | None = node._messenger
        if made is None:
            made = node._messenger = Messenger(node)
    return made


# Messengers call functions of the interpreter, so they are destroyed before it exits. Receives are cancelled. Sent messages that are not
# received are waited for, at most ten seconds.
_open: weakref.WeakSet[Messenger] = weakref.WeakSet()


def _at_exit() -> None:
    for messenger in list(_open):
        handle, messenger._handle = messenger._handle, NULL
        if handle != NULL:
            lib.mp_messenger_destroy(handle)
    all_called()


_ends_with_child = False


def _end_with_child() -> None:
    """Makes a child process of multiprocessing destroy its messengers when it exits. Such a child (fork or forkserver) does not run atexit
    functions.
    """
    global _ends_with_child
    multiprocessing: Any = sys.modules.get("multiprocessing")
    util: Any = sys.modules.get("multiprocessing.util")
    if _ends_with_child or multiprocessing is None or util is None or multiprocessing.parent_process() is None:
        return
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method(allow_none=True)
    if method != "spawn":
        _ends_with_child = True
        util.Finalize(None, _at_exit, exitpriority=0)


def _after_fork() -> None:
    global _ends_with_child
    _ends_with_child = False
    _open.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
