# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies of ranges of files into tensors, in batches.

Large tensors are copied directly. Small tensors that are adjacent in the file are copied to a GPU as one range, and from there into the
separate tensors by one kernel. Small tensors on the CPU are read directly from the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ._collective import Part
from ._contents import _Contents
from ._context import Context, default_context
from ._garbage import without_collection
from ._library import ffi
from ._plan import Plan, Request
from ._safetensors import Entry
from ._segments import Segments
from ._torch_devices import gpu_of

_cast = ffi.cast
_buffer = ffi.buffer
_BYTES = ffi.typeof("char *")

# Size in bytes below which a tensor is small.
SMALL = 1 << 20
# Maximum total size in bytes of the small tensors of a batch.
_STAGED = 256 << 20
# Minimum number of adjacent small tensors that are copied as one range. Fewer are copied one by one.
_FEWEST = 8
# Number of multiprocessors that copy small tensors within a GPU. The default number suits copies over PCIe. Copies within a GPU are faster
# and need more multiprocessors.
_MULTIPROCESSORS = 32


class Wanted(NamedTuple):
    """Tensor of a file that a program requests."""

    name: str
    entry: Entry
    # Shape and type of the tensor in the file.
    shape: tuple[int, ...]
    stored: Any
    # Type of the tensor that the program receives.
    dtype: Any
    # One device for each copy that the program receives.
    devices: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return self.entry.end - self.entry.begin


def is_read_by_cpu(wanted: Wanted) -> bool:
    """True if the CPU reads the tensor directly from the file. A context copies all other tensors."""
    return wanted.nbytes < SMALL and len(wanted.devices) == 1 and wanted.devices[0].type == "cpu"


Targets = Mapping[str, Sequence[Any]]
"""Tensors to fill, by name. Each name has one tensor per device."""


def allocated(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    return torch.empty(shape, dtype=dtype, device=device)


def batches(wanted: Sequence[Wanted], most: int) -> Iterator[list[Wanted]]:
    """Yields the tensors in batches. Each batch covers at most ``most`` bytes of the file, or consists of one tensor."""
    batch: list[Wanted] = []
    small = 0
    for each in wanted:
        more = each.nbytes if each.nbytes < SMALL else 0
        if batch and (each.entry.end - batch[0].entry.begin > most or small + more > _STAGED):
            yield batch
            batch, small = [], 0
        batch.append(each)
        small += more
    if batch:
        yield batch


class Filler:
    """Copies data from files into tensors, by one context."""

    def __init__(self, context: Context | None) -> None:
        self._context = context
        # Kernels that copy the previous batch from its ranges into the small tensors.
        self._running: list[Request] = []

    def fill(self, contents: _Contents, batch: Sequence[Wanted], targets: Targets) -> None:
        """Copies the data of a batch into its targets. On return, the file has been read. Copies within GPUs and conversions may still
        run.
        """
        with without_collection():
            copied = _Batch(batch, targets)
            if copied.read:
                _read(contents, copied.read)
        if copied.direct or copied.runs:
            self._copy(contents, copied)
        copied.convert()

    def finish(self) -> None:
        """Blocks until all copies have finished. Conversions may still run in torch's current streams."""
        running, self._running = self._running, []
        for request in running:
            request.synchronize()

    def _copy(self, contents: _Contents, batch: _Batch) -> None:
        context = self._context if self._context is not None else default_context()
        memory, first = contents.range(*batch.span())
        pairs: list[Any] = []
        for each, tensors in batch.direct:
            pairs += [(tensor, Part(memory, each.entry.begin - first, each.nbytes)) for tensor in tensors]
        scattered: dict[int | None, Segments] = {}
        for run in batch.runs:
            begin, end = run[0][0].entry.begin, run[-1][0].entry.end
            for at, device in enumerate(run[0][0].devices):
                staging = allocated((end - begin,), torch.uint8, device)
                pairs.append((staging, Part(memory, begin - first, end - begin)))
                segments = scattered.setdefault(gpu_of(staging), Segments())
                for each, tensors in run:
                    address = staging.data_ptr() + each.entry.begin - begin
                    segments.add(tensors[at].data_ptr(), address, each.nbytes, (tensors[at], staging))
        # A file is loaded once, so measuring variants of the plan would take more time than it saves.
        with contents.copying():
            Plan(pairs, adapt=False, context=context, as_bytes=True).execute().synchronize()
        self.finish()
        for gpu, segments in scattered.items():
            if gpu is None:
                segments.copy_by_cpu()
            else:
                self._running.append(segments.copy(gpu, context, multiprocessors=_MULTIPROCESSORS))


_Filled = tuple[Wanted, Sequence[Any]]
"""Tensor of a file, and the tensors that receive its bytes."""


class _Batch:
    """Tensors of a batch, divided by the method that copies them."""

    def __init__(self, batch: Sequence[Wanted], targets: Targets) -> None:
        # Three lists: tensors that the CPU reads, tensors that are copied one by one, and runs of adjacent tensors that
        # are copied as one range.
        self.read: list[tuple[Wanted, Any]] = []
        self.direct: list[_Filled] = []
        self.runs: list[list[_Filled]] = []
        self._converted: list[tuple[Any, Any]] = []
        run: list[_Filled] = []
        for each in batch:
            filled = (each, self._received(each, targets[each.name]))
            if run and not (each.nbytes < SMALL and each.entry.begin == run[-1][0].entry.end and each.devices == run[0][0].devices):
                self._add_run(run)
                run = []
            if each.nbytes >= SMALL:
                self.direct.append(filled)
            elif is_read_by_cpu(each):
                self.read.append((each, filled[1][0]))
            else:
                run.append(filled)
        self._add_run(run)

    def _received(self, each: Wanted, targets: Sequence[Any]) -> Sequence[Any]:
        """Returns the tensors that receive the bytes of the file: the targets, or new tensors of the stored type if they are converted."""
        if each.stored is each.dtype:
            return targets
        stored = [allocated(each.shape, each.stored, device) for device in each.devices]
        self._converted += zip(targets, stored)
        return stored

    def _add_run(self, run: list[_Filled]) -> None:
        if len(run) < _FEWEST:
            self.direct += run
        else:
            self.runs.append(run)

    def span(self) -> tuple[int, int]:
        """Returns begin and end of the smallest range of the file that contains all tensors that the context copies."""
        each = [wanted.entry for wanted, _ in self.direct]
        each += [run[at][0].entry for run in self.runs for at in (0, -1)]
        return min(entry.begin for entry in each), max(entry.end for entry in each)

    def convert(self) -> None:
        """Enqueues the conversions to the requested types in torch's current streams."""
        for target, stored in self._converted:
            target.copy_(stored)
        self._converted.clear()


def _read(contents: _Contents, tensors: Sequence[tuple[Wanted, Any]]) -> None:
    """Reads tensors in CPU memory directly from the file. Adjacent tensors are read by one call."""
    buffers: list[Any] = []
    begin = end = 0
    for each, tensor in tensors:
        if buffers and each.entry.begin != end:
            contents.read(buffers, begin)
            buffers = []
        if not buffers:
            begin = each.entry.begin
        buffers.append(_buffer(_cast(_BYTES, tensor.data_ptr()), each.nbytes))
        end = each.entry.end
    contents.read(buffers, begin)
