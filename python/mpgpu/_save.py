# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saving of tensors into a safetensors file.

The data of the file are divided into windows. A window is a section of the file of at most ``_WINDOW`` bytes that is copied to pinned
memory as a whole.
"""

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

# Size of a window in bytes.
_WINDOW = 256 << 20
# Size in bytes below which a part of a tensor is small. One kernel copies all small parts of a window that are on the same GPU.
_SMALL = 1 << 20


class _Saved(NamedTuple):
    """Tensor that is saved, and its range in the data of the file."""

    tensor: Any
    begin: int
    end: int


class _Part(NamedTuple):
    """Part of a contiguous tensor that is in one window: offset in the tensor, size, and offset in the window, all in bytes."""

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

    The file is replaced atomically: the data are written to a temporary file in the same folder, which is renamed to ``path`` when all data
    are on the disk. If the call raises an exception, or the process or the system ends early, an existing file with this path is intact.
    The temporary file ``.mpgpu-*.tmp`` remains only if the process is killed or the system ends. The layout of the file is that of
    ``safetensors.torch.save_file``.

    Tensors may be on any supported device and have any strides. Memory that two tensors share is written twice. The call saves the contents
    that the tensors have after all earlier work in torch's current streams. No tensor may be modified until the call returns.

    Args:
        tensors: a dict of tensors, for example ``model.state_dict()``.
        path: path of the file. If it is a symbolic link, the file to which it leads is replaced.
        metadata: a dict of strings for the header of the file.
        wait: False to return as soon as all tensors are copied to pinned host memory, which needs as many bytes as the file. The
            tensors may then be modified, while threads write the file. At exit, the interpreter waits for these threads.
        context: the context that executes the copies. The default is :func:`mpgpu.default_context`.

    Returns:
        ``None``. With ``wait=False``, an object to wait for the end of the save.

    Raises:
        ArgumentError: an object is not a tensor or has no memory of its own, its type or name cannot be stored in the format, or
            ``metadata`` is not a dict of strings.
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
    """Save that threads complete in the background. If this object is discarded and the save fails, a RuntimeWarning is issued."""

    def __init__(self, file: NewFile, writers: Writers, buffers: Sequence[Any], keep: Any) -> None:
        self._path = file.name
        self._state = state = _State(file, writers, buffers, keep)
        self._process = os.getpid()
        # The thread holds no reference to this object, so that discarding the object is detected.
        threading.Thread(target=state.run, name="mpgpu-save", daemon=False).start()

    def wait(self) -> None:
        """Blocks until the file is complete and on the disk. If the save has failed, each call raises its error."""
        if os.getpid() != self._process and not self._state.ended.is_set():
            raise Error(f"{self._path}: this process was forked from the process that saves the file: call wait() in the parent process")
        self._state.ended.wait()
        self._state.is_reported = True
        if self._state.error is not None:
            raise copy.copy(self._state.error)

    def done(self) -> bool:
        """Returns true once the file is complete. Raises the error of the save if it has failed. Does not block."""
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
    """State of a save in the background, which the program's object and the thread share."""

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
            # The memory is freed before the program is notified.
            self._buffers = self._keep = None
            self.ended.set()
        if self.is_dropped:
            self.report(self._file.name)

    def report(self, path: str) -> None:
        """Issues a RuntimeWarning if the save has failed and the error has not been raised to the program."""
        if self.error is not None and not self.is_reported:
            self.is_reported = True
            warnings.warn(
                f"{path}: the tensors were not saved ({self.error}); an older file with this path is unchanged",
                RuntimeWarning,
                stacklevel=2,
            )


def _layout(tensors: Any, metadata: Any) -> tuple[bytes, list[_Saved]]:
    """Returns the header of the file, and the tensors with their ranges in the data."""
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
            raise ArgumentError(f"tensors[{name!r}]: the format cannot store {tensor.dtype}: convert the tensor first", argument="tensors")
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
                    f"tensors[{name!r}]: the format cannot store {tensor.dtype} without dimensions: reshape the tensor to (1,)",
                    argument="tensors",
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
            f"tensors[{name!r}] is a {type(tensor).__name__}: it must be a tensor; pass a dict that contains only tensors",
            argument="tensors",
        )
    reason = why_no_memory(torch, tensor)
    if reason is not None:
        raise ArgumentError(f"tensors[{name!r}]: {reason}", argument="tensors")


def _windows(saved: Sequence[_Saved], most: int) -> Iterator[tuple[int, list[_Part]]]:
    """Divides the data into windows of at most ``most`` bytes. Yields the offset of each window in the data, and the parts of contiguous
    tensors in it.
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
    """Writes the data of tensors from byte ``first`` of the file on. A window is copied while threads write the previous window."""
    # The windows use two pinned buffers alternately. A window is copied into the buffer of the window before the previous one, as soon as
    # threads have written that window.
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
    """Copies all tensors to pinned memory. Returns views of this memory, and the object that keeps it allocated."""
    if not saved:
        return [], None
    buffer = Buffer(saved[-1].end, context=context)
    for begin, parts in _windows(saved, _WINDOW):
        _copy(parts, buffer[begin : begin + parts[-1].at + parts[-1].nbytes], context)
    return [buffer.memoryview()], buffer


def _buffers(parts: Sequence[_Part], buffer: Buffer | None) -> list[Any]:
    """Returns the buffers that contain a window, in order: pinned memory for parts on GPUs, and memory of the tensors on the CPU."""
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
    """Copies the parts of a window to pinned memory. Blocks."""
    context = context if context is not None else default_context()
    into = memory_of(buffer, "the pinned memory")
    pairs: list[Any] = []
    # Small parts by GPU, or None for the CPU.
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
