# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saving of tensors into a safetensors file."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch

from ._collective import Part
from ._context import Buffer, Context, default_context
from ._garbage import without_collection
from ._library import Owner, ffi
from ._memory import Memory, memory_of, why_no_memory
from ._new_file import NewFile, Writers, Written
from ._plan import Plan
from ._safetensors import TORCH_TYPES, Entry, header_of
from ._segments import Segments
from ._torch_devices import gpu_of
from ._trees import plain
from .errors import ArgumentError, Error

_cast = ffi.cast
_BYTES = ffi.typeof("char *")

# Number of bytes of the file that are copied and written at a time.
_WINDOW = 256 << 20
# Size in bytes below which a part of a GPU tensor is copied by a kernel, together with other small parts.
_SMALL = 1 << 20


class _Saved(NamedTuple):
    """Tensor that is saved, and its position in the file."""

    tensor: Any
    begin: int
    end: int


class _Part(NamedTuple):
    """Part of a contiguous tensor: offset in the tensor, size, and offset in the window of the file."""

    tensor: Any
    offset: int
    nbytes: int
    at: int


@overload
def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    wait: Literal[True] = True,
    context: Context | None = None,
) -> None: ...


@overload
def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    wait: Literal[False],
    context: Context | None = None,
) -> PendingSave: ...


@overload
def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    wait: bool,
    context: Context | None = None,
) -> PendingSave | None: ...


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    wait: bool = True,
    context: Context | None = None,
) -> PendingSave | None:
    """Saves tensors by name into one safetensors file. GPU tensors are copied to pinned memory over all suitable links, while threads write
    earlier data.

    The file is replaced atomically: the data are written into a temporary file in the same folder, which gets the name ``path`` after all
    data are on the disk. If the call raises an exception, or the process or the system ends, an older file with this path is intact. Only
    if the process is killed, the temporary file ``.mpgpu-*.tmp`` remains. The layout is that of ``safetensors.torch.save_file``.

    Tensors may be on any supported device and have any strides. Memory that two tensors share is written twice. The data are those after
    all earlier work in torch's current streams. No tensor may be changed until the call returns.

    Args:
        tensors: a dict of tensors, for example ``model.state_dict()``.
        path: path of the file. A link is followed.
        metadata: a dict of strings for the header of the file.
        wait: False to return as soon as all tensors are copied to pinned host memory, which needs as many bytes as the file. Threads then
            write the file, and the tensors may be changed. The interpreter waits for these threads when the program ends.
        context: the context that executes the copies. The default is :func:`mpgpu.default_context`.

    Returns:
        ``None``, or with ``wait=False`` an object to wait for.

    Raises:
        ArgumentError: an object is not a tensor or has no memory of its own, the format lacks its type or name, or ``metadata`` is not a
            dict of strings.
        OSError: the file cannot be written. The message contains the reason that the system reports.
        OutOfMemory, MemoryError: a device or the host has no more memory.
    """
    with without_collection():
        header, saved = _layout(tensors, metadata)
    file = NewFile(path)
    writers: Writers | None = None
    try:
        writers = Writers(file.file, file.name)
        if not wait:
            buffers, keep = _copied(saved, context)
            return PendingSave(file, writers, [header, *buffers], keep)
        start = writers.write([header], 0)
        _write(saved, len(header), writers, context)
        start.wait()
        writers.close()
        file.commit()
    except BaseException:
        if writers is not None:
            writers.cancel()
            writers.close()
        file.discard()
        raise
    return None


class PendingSave(Owner):
    """Save that threads complete. It may be dropped; if the save then fails, the error is printed."""

    def __init__(self, file: NewFile, writers: Writers, buffers: Sequence[Any], keep: Any) -> None:
        self._path = file.name
        self._state = state = _State(file, writers, buffers, keep)
        self._process = os.getpid()
        # The thread does not refer to this object, so that the object can be dropped.
        threading.Thread(target=state.run, name="mpgpu-save", daemon=False).start()

    def wait(self) -> None:
        """Blocks until the file is complete on the disk. If the save has failed, every call raises its error."""
        if os.getpid() != self._process and not self._state.ended.is_set():
            raise Error(f"{self._path}: this process is a child of the one that saves the file: wait in the parent")
        self._state.ended.wait()
        self._state.is_reported = True
        if self._state.error is not None:
            raise copy.copy(self._state.error)

    def done(self) -> bool:
        """Returns true if the save has finished. Does not block. If the save has failed, raises its error."""
        if not self._state.ended.is_set():
            return False
        self.wait()
        return True

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None:
            state.is_dropped = True
            state.report(self._path)

    def __repr__(self) -> str:
        return f"<mpgpu.torch.PendingSave: {self._path}, {'finished' if self._state.ended.is_set() else 'in progress'}>"


class _State:
    """State of a save that threads complete."""

    def __init__(self, file: NewFile, writers: Writers, buffers: Sequence[Any], keep: Any) -> None:
        self._file = file
        self._writers = writers
        self._buffers: Any = buffers
        # Object that keeps the memory of the buffers allocated.
        self._keep = keep
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.is_dropped = False
        self.is_reported = False

    def run(self) -> None:
        try:
            try:
                self._writers.write(self._buffers, 0).wait()
            finally:
                self._writers.close()
            self._file.commit()
        except BaseException as error:
            self.error = error.with_traceback(None)
            self._file.discard()
        finally:
            # The memory is released before the program is notified.
            self._buffers = self._keep = None
            self.ended.set()
        if self.is_dropped:
            self.report(self._file.name)

    def report(self, path: str) -> None:
        """Issues a warning if the save has failed and no caller has received the error."""
        if self.error is not None and not self.is_reported:
            self.is_reported = True
            warnings.warn(f"{path}: the tensors are not saved: {self.error}; the older file is intact", RuntimeWarning, stacklevel=2)


def _layout(tensors: Any, metadata: Any) -> tuple[bytes, list[_Saved]]:
    """Returns the start of the file, and the tensors with their offsets in the data."""
    if not isinstance(tensors, Mapping):
        raise ArgumentError(
            f"tensors is a {type(tensors).__name__}: pass a dict of tensors, for example x.state_dict()", argument="tensors"
        )
    if metadata is not None and not (
        isinstance(metadata, Mapping) and all(isinstance(each, str) for pair in metadata.items() for each in pair)
    ):
        raise ArgumentError(f"metadata={metadata!r:.200}: must be a dict of strings", argument="metadata")
    ranks = {getattr(torch, known, None): (rank, name) for rank, (name, known) in enumerate(TORCH_TYPES.items())}
    order: list[tuple[int, str, str, Any]] = []
    for name, tensor in tensors.items():
        _check(name, tensor)
        found = ranks.get(tensor.dtype)
        if found is None:
            raise ArgumentError(f"tensors[{name!r}]: the format has no type {tensor.dtype}: convert the tensor first", argument="tensors")
        order.append((*found, name, tensor))
    order.sort(key=lambda each: (each[0], each[2]))
    entries: dict[str, Entry] = {}
    saved: list[_Saved] = []
    at = 0
    for _, kind, name, tensor in order:
        shape = tuple(tensor.shape)
        if kind == "F4":
            if not shape:
                raise ArgumentError(
                    f"tensors[{name!r}]: the format has no {tensor.dtype} without dimensions: reshape it", argument="tensors"
                )
            shape = (*shape[:-1], shape[-1] * 2)
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = Entry(kind, shape, at, end)
        if end > at:
            saved.append(_Saved(tensor, at, end))
        at = end
    return header_of(entries, metadata), saved


def _check(name: Any, tensor: Any) -> None:
    if not isinstance(name, str):
        raise ArgumentError(f"tensors has the key {name!r}: names of tensors must be strings", argument="tensors")
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"tensors[{name!r}] is a {type(tensor).__name__}: it must be a tensor; pass one dict without dicts in it", argument="tensors"
        )
    reason = why_no_memory(torch, tensor)
    if reason is not None:
        raise ArgumentError(f"tensors[{name!r}]: {reason}", argument="tensors")


def _windows(saved: Sequence[_Saved], most: int) -> Iterator[tuple[int, list[_Part]]]:
    """Yields the windows of the data: the offset of a window, and the parts of contiguous tensors in it. A window has at most ``most``
    bytes.
    """
    begin, parts = 0, []
    for each in saved:
        tensor, at = plain(each.tensor), each.begin
        while at < each.end:
            nbytes = min(each.end, begin + most) - at
            parts.append(_Part(tensor, at - each.begin, nbytes, at - begin))
            at += nbytes
            if at == begin + most:
                yield begin, parts
                begin, parts = at, []
    if parts:
        yield begin, parts


def _write(saved: Sequence[_Saved], first: int, writers: Writers, context: Context | None) -> None:
    """Writes the data of tensors from byte ``first`` of the file on. The data of a window are copied while the previous one is written."""
    # Each window uses one of two pinned buffers after the window before the previous one is written.
    pinned: list[Buffer | None] = [None, None]
    writing: list[Written | None] = [None, None]
    size = min(_WINDOW, saved[-1].end) if saved else 0
    windows = _windows(saved, _WINDOW)
    for turn in itertools.cycle(range(2)):
        with without_collection():
            begin, parts = next(windows, (0, []))
        if not parts:
            break
        earlier = writing[turn]
        if earlier is not None:
            earlier.wait()
        buffer = pinned[turn]
        copied = [part for part in parts if gpu_of(part.tensor) is not None]
        if copied and buffer is None:
            buffer = pinned[turn] = Buffer(size, context=context)
        if copied and buffer is not None:
            _copy(copied, buffer, context)
        with without_collection():
            writing[turn] = writers.write(_buffers(parts, buffer), first + begin, (parts, buffer))
    for each in writing:
        if each is not None:
            each.wait()


def _copied(saved: Sequence[_Saved], context: Context | None) -> tuple[list[Any], Any]:
    """Copies all tensors into pinned memory. Returns the parts of this memory, and the objects that keep it allocated."""
    if not saved:
        return [], None
    buffer = Buffer(saved[-1].end, context=context)
    for begin, parts in _windows(saved, _WINDOW):
        _copy(parts, buffer[begin : begin + parts[-1].at + parts[-1].nbytes], context)
    return [buffer.memoryview()], buffer


def _buffers(parts: Sequence[_Part], buffer: Buffer | None) -> list[Any]:
    """Returns the memory of the parts of a window, one after the other: pinned memory for parts on GPUs, and the tensors on the CPU."""
    found: list[Any] = []
    view = buffer.memoryview() if buffer is not None else None
    begin = end = 0
    for part in parts:
        if gpu_of(part.tensor) is None:
            if end > begin and view is not None:
                found.append(view[begin:end])
            found.append(ffi.buffer(_cast(_BYTES, part.tensor.data_ptr() + part.offset), part.nbytes))
            begin = end = part.at + part.nbytes
        else:
            end = part.at + part.nbytes
    if end > begin and view is not None:
        found.append(view[begin:end])
    return found


def _copy(parts: Sequence[_Part], buffer: Buffer, context: Context | None) -> None:
    """Copies parts of tensors into pinned memory. Blocks."""
    context = context if context is not None else default_context()
    into = memory_of(buffer, "the pinned memory")
    pairs: list[Any] = []
    # Small parts, by GPU.
    small: dict[int | None, Segments] = {}
    of: Memory | None = None
    last: Any = None
    for part in parts:
        if part.nbytes < _SMALL:
            segments = small.setdefault(gpu_of(part.tensor), Segments())
            segments.add(buffer.address + part.at, part.tensor.data_ptr() + part.offset, part.nbytes, (part.tensor, buffer))
            continue
        if last is not part.tensor or of is None:
            last, of = part.tensor, memory_of(part.tensor, "a tensor")
        pairs.append((Part(into, part.at, part.nbytes), Part(of, part.offset, part.nbytes)))
    running = [segments.copy(gpu, context) for gpu, segments in small.items() if gpu is not None]
    if pairs:
        Plan(pairs, adapt=False, context=context, as_bytes=True).execute().synchronize()
    if None in small:
        small[None].copy_by_cpu()
    for request in running:
        request.synchronize()
