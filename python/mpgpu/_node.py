# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks of a machine that plan together."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Union

from . import _library
from ._collective import _KINDS, Part, pieces, sizes_of
from ._context import Context, default_context
from ._library import NULL, failure, ffi, lib, sized
from ._memory import Memory, memory_of
from ._names import device_number
from ._plan import Plan, _check_memory, _context_of, _options
from .errors import ArgumentError
from .typing import Array, Communicator, Device

Allgather = Callable[[bytes], Union[bytes, Sequence[bytes]]]
"""Takes the bytes of this rank and returns those of all ranks, in their order, as a list or joined. All have the same length."""


class End(NamedTuple):
    """A byte in a window of a rank."""

    rank: int
    """Whose window it is."""
    window: int
    """Which of those that the rank hands in, from 0."""
    offset: int = 0
    """Bytes from its start."""


class NodeTransfer(NamedTuple):
    """A copy between windows of two ranks, or of one."""

    dst: End
    """Where the bytes go."""
    src: End
    """Where they come from."""
    bytes: int
    """How many."""


# Of the halves of collectives: no program's own, unless it takes the highest.
_COLLECTIVE_TAG = 2**64 - 1


class HalfTransfer(NamedTuple):
    """What a rank sends to another or receives from it, without knowing where the other keeps it."""

    memory: Array
    """This rank's, contiguous."""
    rank: int
    """The other rank."""
    tag: int
    """The same in both halves."""
    is_send: bool
    """Whether the other rank receives it."""


def send_to(rank: int, memory: Array, tag: int = 0) -> HalfTransfer:
    """All of ``memory`` to a rank, which hands in :func:`receive_from` with this rank and the same tag."""
    return HalfTransfer(memory, rank, tag, True)


def receive_from(rank: int, memory: Array, tag: int = 0) -> HalfTransfer:
    """All of ``memory`` from a rank, which hands in :func:`send_to` with this rank, the same tag and as many bytes."""
    return HalfTransfer(memory, rank, tag, False)


class NodePlan(Plan):
    """What all ranks of a node move in a step: each executes its part, every step. Made by :meth:`Node.plan`.

    Dropping it waits for this rank's executions; ranks that have come further get :class:`PeerGone`.
    """

    __slots__ = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a plan of a node is made by Node.plan, on all ranks together")


class Node(_library.Owner):
    """Processes of one machine that plan together, each with a context of its own; all make it together.

    Ranks find each other by one of

    - ``comm``: a communicator of mpi4py, or anything with ``Get_rank()``, ``Get_size()`` and ``allgather(object)``;
    - ``rank``, ``ranks`` and ``allgather``: a function of bytes that returns the bytes of all ranks;
    - ``rank``, ``ranks`` and ``socket``: a path, the same on all ranks, in a folder that they all may write to. They wait a minute.

    Args:
        devices: the GPUs that this rank works for; by default those that it sees, shared out evenly where several ranks see them.
        context: this rank's; by default :func:`default_context`.

    Raises:
        RankError: another rank has failed, for the reason in the text, or the allgather has; then what it raised is the ``__cause__``.
        NotSupported: ranks on other machines, or none that knows how the GPUs are joined. ArgumentError.
    """

    __slots__ = ("__weakref__", "_callback", "_context", "_gathering", "_handle", "_lock", "_messenger", "rank", "ranks")

    def __init__(
        self,
        comm: Communicator | None = None,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        allgather: Allgather | None = None,
        socket: str | os.PathLike[str] | None = None,
        devices: Sequence[Device] | None = None,
        context: Context | None = None,
    ) -> None:
        self._handle = NULL
        if comm is not None:
            if (rank, ranks, allgather, socket) != (None, None, None, None):
                raise TypeError("comm says rank, ranks and allgather: leave these and socket out")
            rank, ranks, allgather = int(comm.Get_rank()), int(comm.Get_size()), comm.allgather
        if rank is None or ranks is None:
            raise TypeError("a node needs comm, or rank and ranks with allgather or socket")
        if (allgather is None) == (socket is None):
            raise TypeError("a node needs either an allgather or a socket at which the ranks meet")
        self.rank = _library.number("rank", rank, 2**32 - 1)
        self.ranks = _library.number("ranks", ranks, 2**32 - 1)
        # That of the node's own channels, once there are any, and for who makes it.
        self._messenger: Any = None
        self._lock = threading.Lock()
        _nodes.add(self)
        self._gathering = gathering = _Gathering(allgather, self.ranks)
        self._callback = NULL if allgather is None else ffi.callback("mp_allgather_t", gathering.gather, error=1, onerror=gathering.keep)
        options = sized("mp_node_options_t *")
        if socket is not None:
            path = _library.path_text(socket)
            options.socket = path
        handle, failed = NULL, None
        try:
            self._context = context if context is not None else default_context()
            handle = self._context._handle
            if devices is not None:
                numbers = ffi.new("int32_t[]", [device_number(each, "devices") for each in devices])
                options.devices, options.device_count = numbers, len(numbers)
        except BaseException as error:
            # The other ranks are in the call and wait for this one: it goes there to say why it has failed.
            failed, reason = error, _text(error)
            options.failure = reason
        made = ffi.new("mp_node_t *")
        status = lib.mp_node_create(handle, self.rank, self.ranks, self._callback, NULL, options, made)
        if failed is not None:
            raise failed
        self._check(status)
        self._handle = made[0]

    def __del__(self, destroy: Any = lib.mp_node_destroy) -> None:
        # An object whose arguments were refused has none.
        if getattr(self, "_handle", NULL) != NULL:
            destroy(self._handle)

    @property
    def context(self) -> Context:
        """This rank's."""
        return self._context

    @property
    def devices(self) -> list[int]:
        """The GPUs that this rank works for: those that it has named, else its share of what the ranks see."""
        count = ffi.new("size_t *")
        self._check(lib.mp_node_devices(self._handle, NULL, 0, count))
        numbers = ffi.new("int32_t[]", count[0])
        self._check(lib.mp_node_devices(self._handle, numbers, count[0], count))
        return list(numbers)

    def plan(
        self,
        windows: Iterable[Array],
        transfers: Iterable[NodeTransfer | tuple[Sequence[int], Sequence[int], int]],
        *,
        engine: str | None = None,
        max_paths: int | None = None,
        host_path: bool | None = None,
        chunk_bytes: int | None = None,
        min_bytes: int | None = None,
        staging_bytes: int | None = None,
        relay_gpus: Iterable[Device] | None = None,
        relay_chunks: int | None = None,
        host_chunks: int | None = None,
    ) -> NodePlan:
        """Plan what all ranks move in a step; all call it together.

        Args:
            windows: this rank's memory that transfers may name: contiguous and writable, on a device of the node, or on the host by
                :func:`mpgpu.empty` with ``shared=True``. Ordinary host memory may be moved by its own rank alone.
            transfers: those that this rank sends or receives; each is handed in by one of its two ranks. ``((rank, window, offset),
                (rank, window, offset), bytes)`` does for a :class:`NodeTransfer`.
            engine, max_paths, host_path, chunk_bytes, min_bytes, staging_bytes, relay_chunks, host_chunks: as for :class:`Plan`, the same
                on all ranks.
            relay_gpus: as there; numbers in the order in which the ranks name their GPUs.

        The plan holds the windows. Its executions are those of :class:`Plan`: later work of the stream sees all bytes that this rank
        receives in the step, and may overwrite what it sent. Every rank executes every step.

        Raises:
            As :class:`Plan` and :class:`Node`.
        """
        try:
            memories = [_writable(window, f"window {index}") for index, window in enumerate(windows)]
            copies = [_transfer(index, transfer) for index, transfer in enumerate(transfers)]
            options = _options(
                engine, max_paths, host_path, chunk_bytes, min_bytes, staging_bytes, relay_gpus, None, relay_chunks, host_chunks
            )
            handed = self._handed_in(memories, copies)
        except BaseException as error:
            self._tell(error)
            raise
        return self._plan(memories, handed, options)

    def plan_exchange(
        self,
        halves: Iterable[HalfTransfer],
        *,
        engine: str | None = None,
        max_paths: int | None = None,
        host_path: bool | None = None,
        chunk_bytes: int | None = None,
        min_bytes: int | None = None,
        staging_bytes: int | None = None,
        relay_gpus: Iterable[Device] | None = None,
        relay_chunks: int | None = None,
        host_chunks: int | None = None,
    ) -> NodePlan:
        """Plan as :meth:`plan`, of what this rank sends and receives without knowing where the others keep it, as with MPI.

        Args:
            halves: made by :func:`send_to` and :func:`receive_from`. Those of two ranks meet by both ranks and the tag, several of one
                kind in the order in which each rank hands them in. One that meets none, or one of another size, is refused.
            engine, max_paths, host_path, chunk_bytes, min_bytes, staging_bytes, relay_gpus, relay_chunks, host_chunks: as for
                :meth:`plan`.

        Raises:
            As :meth:`plan`.
        """
        try:
            memories, copies = [], []
            for index, (memory, rank, tag, is_send) in enumerate(halves):
                what = f"half {index}"
                memories.append(memory_of(memory, what) if is_send else _writable(memory, what))
                own = (self.rank, index, 0)
                other = (_library.number("rank", rank, self.ranks - 1), lib.MP_BY_TAG, _library.number("tag", tag, 2**64 - 1))
                size = memories[-1].nbytes
                copies.append((other, own, size) if is_send else (own, other, size))
            options = _options(
                engine, max_paths, host_path, chunk_bytes, min_bytes, staging_bytes, relay_gpus, None, relay_chunks, host_chunks
            )
            handed = self._handed_in(memories, copies)
        except BaseException as error:
            self._tell(error)
            raise
        return self._plan(memories, handed, options)

    def broadcast(self, memory: Array, root: int) -> list[HalfTransfer]:
        """This rank's halves of a broadcast, for :meth:`plan_exchange`: the root's ``memory`` into that of all others.

        Args:
            memory: as many bytes on all ranks; written on all but the root.
            root: the rank that sends.

        Raises:
            ArgumentError: a size that does not fit, or a root that there is not. The others get :class:`RankError`.
        """
        return self._halves("broadcast", root, memory, memory, None)

    def scatter(self, source: Array | None, destination: Array, root: int, *, sizes: Sequence[int] | None = None) -> list[HalfTransfer]:
        """The same of a scatter: of the root's ``source`` one part after the other into the ``destination`` of each rank.

        Args:
            source: read on the root alone; ``None`` elsewhere.
            destination: this rank's part.
            root: as for :meth:`broadcast`, as are the errors.
            sizes: bytes of each rank's part, the same on all ranks; ``None``: all have as many as this one.
        """
        return self._halves("scatter", root, source, destination, sizes)

    def gather(self, source: Array, destination: Array | None, root: int, *, sizes: Sequence[int] | None = None) -> list[HalfTransfer]:
        """The same of a gather: the ``source`` of each rank, one after the other, into the root's ``destination``.

        Args:
            source: this rank's part.
            destination: written on the root alone; ``None`` elsewhere.
            root: the rank that receives.
            sizes: as for :meth:`scatter`.
        """
        return self._halves("gather", root, source, destination, sizes)

    def all_gather(self, source: Array, destination: Array, *, sizes: Sequence[int] | None = None) -> list[HalfTransfer]:
        """The same of an all-gather: the ``source`` of each rank, one after the other, into the ``destination`` of all.

        Args:
            source: this rank's part; where it lies in ``destination`` where it is to be, it is not copied.
            destination: of the size of all parts.
            sizes: as for :meth:`scatter`.
        """
        return self._halves("all_gather", 0, source, destination, sizes)

    def all_to_all(
        self, source: Array, destination: Array, *, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> list[HalfTransfer]:
        """The same of an all-to-all: of ``source`` one part after the other to each rank, and one of each into ``destination``.

        Args:
            source: must not overlap ``destination``.
            destination: another array.
            sent, received: bytes that go to each rank, and that come from each; ``None``: all parts have one size. Where two ranks
                differ, the plan is refused on all, with both.
        """
        try:
            whole, into = memory_of(source, "source"), _writable(destination, "destination")
            rows = [_parts(sent, whole, self.ranks, "sent"), _parts(received, into, self.ranks, "received")]
            tag = _COLLECTIVE_TAG - _KINDS["all_to_all"]
            offsets = [0, 0]
            halves = []
            for rank in range(self.ranks):
                for row, memory, is_send in zip(range(2), (whole, into), (True, False)):
                    size = rows[row][rank]
                    if size:
                        part: Any = Part(memory, offsets[row], size)
                        halves.append(HalfTransfer(part, rank, tag, is_send))
                    offsets[row] += size
            return halves
        except BaseException as error:
            self._tell(error)
            raise

    def _halves(
        self, kind: str, root: int, source: Array | None, destination: Array | None, sizes: Sequence[int] | None
    ) -> list[HalfTransfer]:
        try:
            whole = None if source is None else memory_of(source, "source")
            into = None if destination is None else memory_of(destination, "destination", True)
            # A part of one rank is what all have where sizes are not given.
            own = into if kind == "scatter" else whole
            if own is None:
                raise ArgumentError(f"a {kind} needs this rank's part")
            each = [own.nbytes] * (1 if kind == "broadcast" else self.ranks) if sizes is None else sizes_of(sizes, self.ranks, "sizes")
            if kind != "broadcast":
                self._check_sizes(kind, root, whole, into, each)
            moves = pieces(kind, self.ranks, root, each)
            halves = []
            for sender, receiver, sent_at, received_at, size in moves:
                src: Any = None if whole is None else Part(whole, sent_at, size)
                dst: Any = None if into is None else Part(into, received_at, size)
                if sender == receiver == self.rank and src is not None and dst is not None and src.address == dst.address:
                    continue
                for part, rank, other, is_send in ((src, sender, receiver, True), (dst, receiver, sender, False)):
                    if rank == self.rank:
                        halves.append(HalfTransfer(part, other, _COLLECTIVE_TAG - _KINDS[kind], is_send))
            return halves
        except BaseException as error:
            self._tell(error)
            raise

    def _check_sizes(self, kind: str, root: int, whole: Memory | None, into: Memory | None, each: list[int]) -> None:
        """Refuse memory that has another size than what moves there."""
        part, blocks = ("destination", "source") if kind == "scatter" else ("source", "destination")
        for what, needed, size in ((part, True, each[self.rank]), (blocks, kind == "all_gather" or self.rank == root, sum(each))):
            memory = whole if what == "source" else into
            has = 0 if memory is None else memory.nbytes
            if needed and has != size:
                raise ArgumentError(f"the {what} of this {kind} has {has} bytes, and {size} move there: they must be as many")

    def _handed_in(self, memories: list[Memory], copies: list[Any]) -> tuple[Any, int, Any, int]:
        _context_of(memories, self._context)
        windows = ffi.new("mp_window_t[]", len(memories))
        for index, memory in enumerate(memories):
            _check_memory(self._context, memory, f"window {index}")
            windows[index].memory, windows[index].bytes = memory.pointer, memory.nbytes
        return windows, len(memories), ffi.new("mp_node_transfer_t[]", copies), len(copies)

    def _plan(self, memories: list[Memory], handed: tuple[Any, int, Any, int], options: Any) -> NodePlan:
        made = ffi.new("mp_plan_t *")
        self._check(lib.mp_node_plan(self._handle, *handed, NULL, options, made))
        plan = NodePlan.__new__(NodePlan)
        plan._own_plan(self._context, made[0], memories)
        return plan

    def fail(self, reason: str) -> None:
        """Take part in the call in which the other ranks are, or to which they come next, as a rank that has failed.

        It fails on them with :class:`RankError` and ``reason``. For a rank that cannot make the call, because it could not get its
        memory, say; what a call refuses the others are told by the call.
        """
        self._check(lib.mp_node_fail(self._handle, _text(reason)))

    def _tell(self, error: BaseException) -> None:
        """The other ranks are in a call and wait for this one, which has failed before it."""
        lib.mp_node_fail(self._handle, _text(error))
        self._gathering.raised = None

    def _check(self, status: int) -> None:
        raised, self._gathering.raised = self._gathering.raised, None
        if status:
            if raised is not None and not isinstance(raised, Exception):
                # Ctrl-C, or an exit.
                raise raised
            raise failure(status) from raised

    def __repr__(self) -> str:
        return f"<mpgpu.Node: rank {self.rank} of {self.ranks}>"


class _Gathering:
    """The allgather as the library calls it. Does not know its node, which so goes with its last reference and not with a collection."""

    __slots__ = ("allgather", "raised", "ranks")

    def __init__(self, allgather: Any, ranks: int) -> None:
        self.allgather = allgather
        self.ranks = ranks
        self.raised: BaseException | None = None

    def gather(self, _: Any, send: Any, receive: Any, size: int) -> int:
        gathered = self.allgather(bytes(ffi.buffer(send, size)))
        joined = bytes(gathered) if isinstance(gathered, (bytes, bytearray, memoryview)) else b"".join(gathered)
        if len(joined) != size * self.ranks:
            raise ValueError(f"the allgather gave {len(joined)} bytes for {self.ranks} ranks with {size} bytes each")
        ffi.memmove(receive, joined, len(joined))
        return 0

    def keep(self, _: Any, value: BaseException, __: Any) -> None:
        self.raised = value


def _text(reason: object) -> Any:
    """Why a rank has failed, for the others."""
    return ffi.new("char[]", (str(reason) or type(reason).__name__).encode("utf-8", "replace"))


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _after_fork() -> None:
    # A thread that the child does not have may have held one.
    for node in _nodes:
        node._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _parts(sizes: Sequence[int] | None, memory: Memory, ranks: int, what: str) -> list[int]:
    """Bytes of each rank's part of some memory."""
    parts = [memory.nbytes // ranks] * ranks if sizes is None else sizes_of(sizes, ranks, what)
    if sum(parts) != memory.nbytes:
        raise ArgumentError(f"{what}={parts} for {ranks} ranks and memory of {memory.nbytes} bytes: a size for each, which add up to that")
    return parts


def _writable(window: Any, what: str) -> Memory:
    memory = memory_of(window, what, True)
    if memory.readonly:
        raise ArgumentError(f"{what} is read-only: other ranks' transfers may write it; pass memory that may be written")
    return memory


def _transfer(index: int, transfer: Any) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    try:
        dst, src, size = transfer
        ends = tuple((*end, 0) if len(end) == 2 else tuple(end) for end in (dst, src))
        if any(len(end) != 3 for end in ends):
            raise ValueError
        ends, size = tuple(tuple(map(operator.index, end)) for end in ends), operator.index(size)
        if any(number < 0 for number in (*ends[0], *ends[1], size)):
            raise ValueError
    except (TypeError, ValueError):
        raise TypeError(
            f"transfer {index} is {transfer!r}: it must be ((rank, window, offset), (rank, window, offset), bytes), all from 0 up"
        ) from None
    for name, value, most in (
        *(("rank", end[0], 2**32 - 1) for end in ends),
        # The highest number stands for no window.
        *(("window", end[1], lib.MP_BY_TAG - 1) for end in ends),
        *(("offset", end[2], 2**64 - 1) for end in ends),
        ("bytes", size, 2**64 - 1),
    ):
        if value > most:
            raise ArgumentError(f"transfer {index}: {name}={value}: must be from 0 to {most}")
    return ends[0], ends[1], size
