# SPDX-License-Identifier: MIT OR Apache-2.0
"""Nodes: groups of processes (ranks) on one machine that plan their transfers together."""

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
"""Allgather function: takes this rank's bytes and returns the bytes of all ranks in rank order, as a list or joined. All ranks pass the
same number of bytes.
"""


class End(NamedTuple):
    """Source or destination of a :class:`NodeTransfer`: a rank, the index of one of its windows, and an offset in bytes. A window is a
    memory range that a rank passes to :meth:`Node.plan`.
    """

    rank: int
    """Rank that owns the window."""
    window: int
    """Index of the window among those that the rank passes, from 0."""
    offset: int = 0
    """Offset from the start of the window, bytes."""


class NodeTransfer(NamedTuple):
    """Copy from a window of one rank to a window of another or the same rank. A window is a memory range that a rank passes to
    :meth:`Node.plan`.
    """

    dst: End
    """Destination."""
    src: End
    """Source."""
    bytes: int
    """Number of bytes."""


# Highest tag of the descriptors of collectives. High numbers are used, because tags of programs are usually low.
_COLLECTIVE_TAG = 2**64 - 1


class HalfTransfer(NamedTuple):
    """Send or receive descriptor: one rank's side of a transfer. It contains this rank's memory, the other rank and a tag. It does not
    contain the position in the other rank's memory.
    """

    memory: Array
    """Memory of this rank, contiguous."""
    rank: int
    """The other rank."""
    tag: int
    """Tag, equal in the send and the receive descriptor."""
    is_send: bool
    """True if this rank sends the bytes."""


def send_to(rank: int, memory: Array, tag: int = 0) -> HalfTransfer:
    """Returns a descriptor that sends all of ``memory`` to rank ``rank`` of the node. That rank passes a :func:`receive_from` descriptor
    with the calling rank and the same tag.
    """
    return HalfTransfer(memory, rank, tag, True)


def receive_from(rank: int, memory: Array, tag: int = 0) -> HalfTransfer:
    """Returns a descriptor that receives all of ``memory`` from rank ``rank`` of the node. That rank passes a :func:`send_to` descriptor
    with the calling rank, the same tag and the same size.
    """
    return HalfTransfer(memory, rank, tag, False)


class NodePlan(Plan):
    """Plan for all transfers between the ranks of a node. :meth:`Node.plan` creates it. One execution by all ranks is a step. Every rank
    executes every step.

    Dropping the plan blocks until the executions that this rank has enqueued have finished. Other ranks that have executed the plan more
    often than this rank get :class:`PeerGone`.
    """

    __slots__ = ()

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a node plan (one plan for all ranks) is created by Node.plan, which all ranks call together")


class Node(_library.Owner):
    """Node: group of processes (ranks) on one machine that plan their transfers together. Each process has its own context. All ranks
    create the node together; the constructor blocks until all have called it.

    The ranks find each other in one of the following ways:

    - ``comm``: a communicator of mpi4py, or any object with ``Get_rank()``, ``Get_size()`` and ``allgather(object)``;
    - ``rank``, ``ranks`` and ``allgather``: a function that takes this rank's bytes and returns the list of the bytes of all ranks;
    - ``rank``, ``ranks`` and ``socket``: the path of a Unix socket, equal on all ranks, in a directory to which all of them can write. The
      ranks wait at most one minute for each other.

    Args:
        devices: the GPUs that this rank uses. By default these are the visible GPUs; GPUs that are visible to several ranks are divided
            evenly.
        context: the context of this rank. The default is :func:`default_context`.

    Raises:
        RankError: another rank has failed, and the message contains its reason. Or the allgather function has failed; its exception is the
            ``__cause__``.
        NotSupported: some ranks are on other machines, or no rank can determine how the GPUs are connected.
        ArgumentError: an argument is invalid.
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
                raise TypeError("comm provides rank, ranks and allgather: omit these and socket")
            rank, ranks, allgather = int(comm.Get_rank()), int(comm.Get_size()), comm.allgather
        if rank is None or ranks is None:
            raise TypeError("a Node needs comm, or rank and ranks with allgather or socket")
        if (allgather is None) == (socket is None):
            raise TypeError("a Node needs either an allgather or the path of a socket through which the ranks connect")
        self.rank = _library.number("rank", rank, 2**32 - 1)
        self.ranks = _library.number("ranks", ranks, 2**32 - 1)
        # Messenger that the node's channels use, if there are any, and the lock for creating it.
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
            # The other ranks are in the call and wait for this rank. It therefore makes the call too, and passes the reason of its failure.
            failed, reason = error, _text(error)
            options.failure = reason
        made = ffi.new("mp_node_t *")
        status = lib.mp_node_create(handle, self.rank, self.ranks, self._callback, NULL, options, made)
        if failed is not None:
            raise failed
        self._check(status)
        self._handle = made[0]

    def __del__(self, destroy: Any = lib.mp_node_destroy) -> None:
        # If the constructor rejected its arguments, there is no handle.
        if getattr(self, "_handle", NULL) != NULL:
            destroy(self._handle)

    @property
    def context(self) -> Context:
        """Context of this rank."""
        return self._context

    @property
    def device(self) -> int:
        """First GPU that this rank uses. Raises ArgumentError if it uses no GPU, because there are more ranks than GPUs or another rank
        uses the GPU that both have listed.
        """
        number = ffi.new("int32_t *")
        self._check(lib.mp_node_device(self._handle, number))
        return int(number[0])

    @property
    def devices(self) -> list[int]:
        """GPUs that this rank uses: those that it passed as ``devices`` or, without that argument, its share of the visible GPUs. Empty if
        there are fewer GPUs than ranks.
        """
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
        """Plans all transfers between the ranks together, so that they do not compete for links. All ranks call it together. Blocks until
        all ranks have called it.

        Args:
            windows: memory ranges of this rank from or to which transfers copy. They are contiguous and writable, on a device of the node
                or in host memory. Other ranks can access host memory only if it is from :func:`mpgpu.empty` with ``shared=True``.
            transfers: transfers that this rank sends or receives. Only one of the two ranks passes each transfer. A tuple ``((rank, window,
                offset), (rank, window, offset), bytes)`` of destination, source and size is accepted as a :class:`NodeTransfer`.
            engine, max_paths, host_path, chunk_bytes, min_bytes, staging_bytes, relay_chunks, host_chunks: options with the same meaning as
                for :class:`Plan`, equal on all ranks.
            relay_gpus: the GPUs through which data of other GPUs may be forwarded, as for :class:`Plan`. The GPUs of the node are numbered
                rank by rank, in the order in which each rank lists or sees them.

        The plan keeps the windows alive. Its executions are like those of :class:`Plan`: later work in the stream sees all data that this
        rank receives in the step (execution), and may overwrite the data that it sent. Every rank executes every step.

        Raises:
            The exceptions of :class:`Plan` and :class:`Node`.
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
        """Plans the transfers that are described by send and receive descriptors. Use descriptors if the ranks do not know the positions of
        the data in each other's memory, as with MPI. In all other respects this method is the same as :meth:`plan`.

        Args:
            halves: send and receive descriptors from :func:`send_to` and :func:`receive_from`. Sends match receives by source, destination
                and tag, in the order in which each rank passes them. A descriptor without a match, or whose size differs from its match, is
                an error.
            engine, max_paths, host_path, chunk_bytes, min_bytes, staging_bytes, relay_gpus, relay_chunks, host_chunks: options with the
                same meaning as for :meth:`plan`.

        Raises:
            The exceptions of :meth:`plan`.
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
        """Returns this rank's descriptors for a broadcast, to pass to :meth:`plan_exchange`. The plan copies ``memory`` of the root to
        ``memory`` of all other ranks.

        Args:
            memory: memory of equal size on all ranks. It is written on all ranks except the root.
            root: the rank that sends.

        Raises:
            ArgumentError: the size is wrong, or the root does not exist. The other ranks get :class:`RankError`.
        """
        return self._halves("broadcast", root, memory, memory, None)

    def scatter(self, source: Array | None, destination: Array, root: int, *, sizes: Sequence[int] | None = None) -> list[HalfTransfer]:
        """Returns this rank's descriptors for a scatter, to pass to :meth:`plan_exchange`. The plan copies consecutive parts of the root's
        ``source`` to the ``destination`` of each rank. Errors are those of :meth:`broadcast`.

        Args:
            source: the memory that is distributed. Used only on the root; ``None`` on other ranks.
            destination: the memory that receives this rank's part.
            root: the rank that sends.
            sizes: size of each rank's part in bytes, as a list that is equal on all ranks. ``None`` if all parts have the size of this
                rank's part.
        """
        return self._halves("scatter", root, source, destination, sizes)

    def gather(self, source: Array, destination: Array | None, root: int, *, sizes: Sequence[int] | None = None) -> list[HalfTransfer]:
        """Returns this rank's descriptors for a gather, to pass to :meth:`plan_exchange`. The plan copies the ``source`` of each rank to
        consecutive parts of the root's ``destination``. Errors are those of :meth:`broadcast`.

        Args:
            source: this rank's part.
            destination: the memory that receives all parts. Used only on the root; ``None`` on other ranks.
            root: the rank that receives.
            sizes: size of each rank's part, in the same form as for :meth:`scatter`.
        """
        return self._halves("gather", root, source, destination, sizes)

    def all_gather(self, source: Array, destination: Array, *, sizes: Sequence[int] | None = None) -> list[HalfTransfer]:
        """Returns this rank's descriptors for an all-gather, to pass to :meth:`plan_exchange`. The plan copies the ``source`` of each rank
        to consecutive parts of the ``destination`` of all ranks. Errors are those of :meth:`broadcast`.

        Args:
            source: this rank's part. It is not copied if it is already at its position in ``destination``.
            destination: the memory that receives all parts. Its size is the sum of the sizes of all parts.
            sizes: size of each rank's part, in the same form as for :meth:`scatter`.
        """
        return self._halves("all_gather", 0, source, destination, sizes)

    def all_to_all(
        self, source: Array, destination: Array, *, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> list[HalfTransfer]:
        """Returns this rank's descriptors for an all-to-all, to pass to :meth:`plan_exchange`. The plan copies one part of ``source`` to
        each rank, and one part from each rank to ``destination``. Errors are those of :meth:`broadcast`.

        Args:
            source: this rank's parts for all ranks, in rank order. It must not overlap ``destination``.
            destination: the memory that receives one part from each rank, in rank order.
            sent, received: number of bytes sent to each rank, and received from each rank, as lists. ``None`` if all parts have equal size.
                If the sizes of a sender and its receiver differ, planning fails on all ranks, and the error text names both ranks.
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
            # If no sizes are passed, the parts of all ranks have the size of this rank's part.
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
        """Raises if the size of memory differs from the number of bytes to copy."""
        part, blocks = ("destination", "source") if kind == "scatter" else ("source", "destination")
        for what, needed, size in ((part, True, each[self.rank]), (blocks, kind == "all_gather" or self.rank == root, sum(each))):
            memory = whole if what == "source" else into
            has = 0 if memory is None else memory.nbytes
            if needed and has != size:
                raise ArgumentError(f"the {what} of this {kind} has {has} bytes, but {size} are transferred there: both must be equal")

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
        """Makes the current or next collective call of the other ranks fail with :class:`RankError` and the text ``reason``. Blocks until
        the other ranks have made their call.

        Use this method if this rank cannot make the collective call itself, for example because it could not allocate memory. A collective
        call that rejects its own arguments already notifies the other ranks.
        """
        self._check(lib.mp_node_fail(self._handle, _text(reason)))

    def _tell(self, error: BaseException) -> None:
        """Notifies the other ranks that this rank has failed before its collective call. They are waiting in that call."""
        lib.mp_node_fail(self._handle, _text(error))
        self._gathering.raised = None

    def _check(self, status: int) -> None:
        raised, self._gathering.raised = self._gathering.raised, None
        if status:
            if raised is not None and not isinstance(raised, Exception):
                # KeyboardInterrupt or SystemExit.
                raise raised
            raise failure(status) from raised

    def __repr__(self) -> str:
        return f"<mpgpu.Node: rank {self.rank} of {self.ranks}>"


class _Gathering:
    """Allgather function that the library calls. It has no reference to its node. The node is therefore released with its last reference,
    without a garbage collection.
    """

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
    """Returns the reason of a failure as a C string, to send to the other ranks."""
    return ffi.new("char[]", (str(reason) or type(reason).__name__).encode("utf-8", "replace"))


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _after_fork() -> None:
    # A new lock is needed, because a thread that does not exist in the child may have held the old one.
    for node in _nodes:
        node._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _parts(sizes: Sequence[int] | None, memory: Memory, ranks: int, what: str) -> list[int]:
    """Returns the size in bytes of each rank's part of the memory."""
    parts = [memory.nbytes // ranks] * ranks if sizes is None else sizes_of(sizes, ranks, what)
    if sum(parts) != memory.nbytes:
        raise ArgumentError(
            f"{what}={parts} for {ranks} ranks and memory of {memory.nbytes} bytes: pass one size for "
            "each rank, which add up to the size of the memory"
        )
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
        # The highest number is MP_BY_TAG, which is not the index of a window.
        *(("window", end[1], lib.MP_BY_TAG - 1) for end in ends),
        *(("offset", end[2], 2**64 - 1) for end in ends),
        ("bytes", size, 2**64 - 1),
    ):
        if value > most:
            raise ArgumentError(f"transfer {index}: {name}={value}: must be from 0 to {most}")
    return ends[0], ends[1], size
