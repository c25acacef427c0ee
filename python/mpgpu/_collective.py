# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives: broadcast, scatter, gather, all-gather and all-to-all, between devices of this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ._context import Context
from ._library import NULL, check, ffi, lib, number
from ._memory import Memory, check_storage, memory_of
from ._plan import Plan, Request, copy_planned
from .errors import ArgumentError
from .typing import Array, StreamLike

_KINDS = {
    "broadcast": lib.MP_BROADCAST,
    "scatter": lib.MP_SCATTER,
    "gather": lib.MP_GATHER,
    "all_gather": lib.MP_ALL_GATHER,
    "all_to_all": lib.MP_ALL_TO_ALL,
}

# Maximum size of a part, bytes. With larger parts, offsets would exceed the range of the library's integers.
_MOST_BYTES = 2**63 - 1

Piece = tuple[int, int, int, int, int]
"""Copy within a collective: sender, receiver, offset in the send buffer, offset in the receive buffer, number of bytes."""


class Part:
    """Part of a memory range. It can be passed wherever the whole range is accepted."""

    __slots__ = ("_bytes", "_offset", "_whole")

    def __init__(self, whole: Memory, offset: int, nbytes: int) -> None:
        self._whole, self._offset, self._bytes = whole, offset, nbytes

    def _mpgpu_memory(self) -> Memory:
        whole = self._whole
        # A part of a node's collective is planned later, so the storage is checked again.
        check_storage(whole)
        return Memory(
            int(ffi.cast("uintptr_t", whole.pointer)) + self._offset,
            self._bytes,
            whole.keep,
            device=whole.device,
            readonly=whole.readonly,
            on_gpu=whole.on_gpu,
            current=whole.current,
            settle=whole.settle,
            context=whole.context,
            name=whole.name,
        )

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self._whole.pointer)) + self._offset


def pieces(kind: str, participants: int, root: int, sizes: Sequence[int]) -> list[Piece]:
    """Returns the copies of a collective operation. ``sizes`` contains the sizes of its blocks in bytes."""
    root = number("root", root, max(participants - 1, 0))
    numbers, count = ffi.new("uint64_t[]", list(sizes) or [0]), ffi.new("size_t *")
    check(lib.mp_collective(_KINDS[kind], participants, root, 0, numbers, NULL, 0, count))
    found = ffi.new("mp_piece_t[]", count[0])
    if count[0]:
        check(lib.mp_collective(_KINDS[kind], participants, root, 0, numbers, found, count[0], count))
    # "from" is a Python keyword.
    return [(getattr(piece, "from"), piece.to, piece.send_offset, piece.receive_offset, piece.bytes) for piece in found]


def sizes_of(sizes: Any, count: int, name: str) -> list[int]:
    """Returns the sizes of parts, one for each of ``count`` participants.

    Raises:
        ArgumentError: a wrong number of sizes, or a negative size.
        TypeError: a size that is not an integer.
    """
    try:
        found = [number(name, size, _MOST_BYTES) for size in sizes]
    except TypeError:
        raise TypeError(f"{name}={sizes!r}: must be a list of whole numbers, bytes of each part") from None
    if len(found) != count:
        raise ArgumentError(f"{name}={found}: {len(found)} sizes for {count} ranks: pass one for each", argument=name)
    return found


def _blocks(values: Iterable[Any], what: str) -> list[Memory]:
    return [memory_of(value, f"{what} {index}", what == "destination") for index, value in enumerate(values)]


def _fits(blocks: Sequence[Memory], sizes: Iterable[int], what: str) -> None:
    for index, (block, size) in enumerate(zip(blocks, sizes)):
        if block.nbytes != size:
            raise ArgumentError(f"{what} {index} has {block.nbytes} bytes, but {size} are transferred there: both must be equal")


def _execute(
    kind: str, sources: Sequence[Memory], destinations: Sequence[Memory], sizes: Sequence[int], stream: Any, context: Context | None
) -> Request:
    """Plans and executes a collective operation. If the operation is repeated, the plan is found in the plan cache of the context."""
    pairs: list[Any] = []
    moves = pieces(kind, max(len(sources), len(destinations)), 0, sizes) if sources and destinations else []
    for sender, receiver, sent, received, size in moves:
        src = Part(sources[sender if len(sources) > 1 else 0], sent, size)
        dst = Part(destinations[receiver if len(destinations) > 1 else 0], received, size)
        if src.address != dst.address:
            pairs.append((dst, src))
    return copy_planned(Plan(pairs, context=context, as_bytes=True), stream)


def broadcast(source: Array, destinations: Iterable[Array], stream: StreamLike | None = None, *, context: Context | None = None) -> Request:
    """Copies all of ``source`` into each of ``destinations``. Destinations that have already received data forward them to others. Source
    and destinations must have the same size; types and shapes are not checked.

    Args:
        source: any object with memory that :class:`Plan` accepts.
        destinations: objects with memory of the same size.
        stream: the stream in which the copies run. See :func:`copy`, which also describes when the copies have finished.
        context: the context that executes the copies. The default is that of :class:`Plan`.

    Raises:
        The exceptions of :class:`Plan`. If a destination has a different size, the text of the ArgumentError contains its index.
    """
    whole, to = memory_of(source, "the source"), _blocks(destinations, "destination")
    _fits(to, [whole.nbytes] * len(to), "destination")
    return _execute("broadcast", [whole], to, [whole.nbytes], stream, context)


def scatter(source: Array, destinations: Iterable[Array], stream: StreamLike | None = None, *, context: Context | None = None) -> Request:
    """Copies consecutive parts of ``source`` into ``destinations``. The sum of the sizes of the destinations must equal the size of
    ``source``. Arguments and errors are those of :func:`broadcast`.
    """
    whole, to = memory_of(source, "the source"), _blocks(destinations, "destination")
    sizes = [block.nbytes for block in to]
    _fits([whole], [sum(sizes)], "source")
    return _execute("scatter", [whole], to, sizes, stream, context)


def gather(sources: Iterable[Array], destination: Array, stream: StreamLike | None = None, *, context: Context | None = None) -> Request:
    """Copies ``sources`` into consecutive parts of ``destination``. The size of ``destination`` must equal the sum of the sizes of the
    sources. Arguments and errors are those of :func:`broadcast`.
    """
    of, whole = _blocks(sources, "source"), memory_of(destination, "the destination", True)
    sizes = [block.nbytes for block in of]
    _fits([whole], [sum(sizes)], "destination")
    return _execute("gather", of, [whole], sizes, stream, context)


def all_gather(
    sources: Iterable[Array], destinations: Iterable[Array], stream: StreamLike | None = None, *, context: Context | None = None
) -> Request:
    """Copies all of ``sources``, one after the other, into each of ``destinations``. There are as many destinations as sources. The size of
    each destination must equal the sum of the sizes of the sources. A source that is already at its position inside its own destination is
    not copied there. Arguments and errors are those of :func:`broadcast`.
    """
    of, to = _blocks(sources, "source"), _blocks(destinations, "destination")
    _as_many(of, to)
    sizes = [block.nbytes for block in of]
    _fits(to, [sum(sizes)] * len(to), "destination")
    return _execute("all_gather", of, to, sizes, stream, context)


def all_to_all(
    sources: Iterable[Array],
    destinations: Iterable[Array],
    stream: StreamLike | None = None,
    *,
    sizes: Sequence[Sequence[int]] | None = None,
    context: Context | None = None,
) -> Request:
    """Copies one part of each of ``sources`` into each of ``destinations``. There are as many destinations as sources. The parts are
    contiguous in the sources and in the destinations. Sources and destinations must not overlap.

    Args:
        sizes: number of bytes for each pair of sender and receiver, as one list per sender. ``None`` if all parts of a source have equal
            size.

    The other arguments and the errors are those of :func:`broadcast`.
    """
    of, to = _blocks(sources, "source"), _blocks(destinations, "destination")
    _as_many(of, to)
    count = len(of)
    rows = [[block.nbytes // count] * count for block in of] if sizes is None else [list(row) for row in sizes]
    if len(rows) != count or any(len(row) != count for row in rows):
        raise ArgumentError(f"sizes must be {count} lists of {count} sizes, one for each sender and receiver", argument="sizes")
    rows = [sizes_of(row, count, "sizes") for row in rows]
    _fits(of, [sum(row) for row in rows], "source")
    _fits(to, [sum(row[index] for row in rows) for index in range(count)], "destination")
    return _execute("all_to_all", of, to, [size for row in rows for size in row], stream, context)


def _as_many(sources: Sequence[Memory], destinations: Sequence[Memory]) -> None:
    if len(sources) != len(destinations):
        raise ArgumentError(
            f"{len(destinations)} destinations for {len(sources)} sources: each participant must have one source and one destination"
        )
