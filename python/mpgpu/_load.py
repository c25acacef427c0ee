# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loading of tensors from a safetensors file onto devices."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch

from ._collective import Part
from ._context import Context
from ._memory import Memory, memory_of
from ._plan import Plan
from ._safetensors import Entry, open_file, read_header
from ._torch_devices import TorchDevice, torch_device
from .errors import ArgumentError

# Maximum number of bytes of a mapped file that are copied in one batch.
_BATCH = 4 << 30
# Maximum number of bytes that are read and copied in one batch if the file cannot be mapped.
_READ_BATCH = 256 << 20
# Number of bytes that the system reads ahead at a time.
_AHEAD = 64 << 20

# Names of element types in torch, by their names in the safetensors format.
_TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    # This type stores two elements in one byte.
    "F4": "float4_e2m1fn_x2",
}


def load(
    path: str | os.PathLike[str],
    device: TorchDevice | Mapping[str, TorchDevice],
    *,
    progress: bool = False,
    context: Context | None = None,
) -> dict[str, torch.Tensor]:
    """Loads the tensors of a safetensors file onto ``device`` and returns them by name. The data are copied directly from the pages of the
    file, over all suitable links, and each byte is read once.

    Args:
        path: path of the file. Its length must not change until the call returns. If data are missing, the call raises an exception and
            returns nothing.
        device: one device for all tensors, or a mapping from names of tensors to devices. Tensors that the mapping does not contain are not
            read.
        progress: True to write progress messages to stderr.
        context: the context that executes the copies. The default is :func:`mpgpu.default_context`.

    Raises:
        ArgumentError: the file has another format or is truncated (the message contains the reason); torch lacks an element type; or a name
            or a device does not exist.
        OSError: the file cannot be opened or read. The message contains the reason that the system reports.
        OutOfMemory, MemoryError: a device or the host has no more memory.
    """
    name = os.fsdecode(path)
    with open_file(path) as file:
        entries = read_header(file, name)
        places = _places(entries, device, name)
        made = {each: _empty(entries[each], where, name, each) for each, where in places.items()}
        # Tensors are sorted by their position, because the file is read in this order.
        wanted = [(made[each], entry) for each, entry in entries.items() if each in made and entry.begin < entry.end]
        with _reading_ahead(file.fileno()):
            _fill(wanted, _Contents(file, name), context, f"{name}: " if progress else None)
        return made


def _places(entries: Mapping[str, Entry], device: Any, path: str) -> dict[str, Any]:
    """Returns the device of each requested tensor, by name."""
    if not isinstance(device, Mapping):
        return dict.fromkeys(entries, torch_device(device))
    for name in device:
        if name not in entries:
            raise ArgumentError(
                f"{path}: the file has no tensor {name!r}, which `device` names; it has {len(entries)} tensors, "
                f"the first is {list(entries)[:1]}",
                argument="device",
            )
    devices = {where: torch_device(where) for where in set(device.values())}
    return {name: devices[where] for name, where in device.items()}


def _empty(entry: Entry, where: Any, path: str, name: str) -> Any:
    known = _TYPES.get(entry.dtype, "")
    dtype = getattr(torch, known, None)
    if dtype is None:
        raise ArgumentError(
            f"{path}: tensor {name!r}: this torch ({torch.__version__}) or mpgpu has no type {entry.dtype}: update them, "
            "or load only the other tensors, device={name: …}"
        )
    shape = entry.shape
    if entry.dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] // 2)
    return torch.empty(shape, dtype=dtype, device=where)


class _Contents:
    """Contents of a file as memory: the mapped pages of the file, or copies of them if the system cannot map the file."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path
        self._pages: Memory | None = None
        with contextlib.suppress(OSError):
            self._pages = memory_of(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)

    @property
    def batch(self) -> int:
        """Maximum number of bytes of the file that are copied to the devices in one batch."""
        return _BATCH if self._pages is not None else _READ_BATCH

    def range(self, begin: int, end: int) -> tuple[Memory, int]:
        """Returns memory that holds bytes `begin` to `end` of the file, and the file offset at which that memory begins."""
        if self._pages is not None:
            if self._pages.nbytes < end:
                raise self._shorter()
            return self._pages, 0
        read = bytearray(end - begin)
        view, at = memoryview(read), begin
        while at < end:
            count = os.preadv(self._file.fileno(), [view[at - begin :]], at)
            if count == 0:
                raise self._shorter()
            at += count
        return memory_of(read, self._path), begin

    def _shorter(self) -> ArgumentError:
        return ArgumentError(f"{self._path}: the file has become shorter since its header was read: load it again when it is complete")


def _fill(wanted: list[tuple[Any, Entry]], contents: _Contents, context: Context | None, shown: str | None) -> None:
    """Copies the data of each tensor from the file into the tensor."""
    total, done, begin = sum(entry.end - entry.begin for _, entry in wanted), 0, time.monotonic()
    for batch in _batches(wanted, contents.batch >> 2 if shown else contents.batch):
        memory, first = contents.range(batch[0][1].begin, batch[-1][1].end)
        pairs: list[Any] = [(tensor, Part(memory, entry.begin - first, entry.end - entry.begin)) for tensor, entry in batch]
        # A file is loaded once, so measuring variants of the plan would take more time than it saves.
        Plan(pairs, adapt=False, context=context, as_bytes=True).execute().synchronize()
        if shown is not None:
            done += sum(entry.end - entry.begin for _, entry in batch)
            rate = done / max(time.monotonic() - begin, 1e-9) * 1e-9
            print(f"\r{shown}{done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.1f} GB/s", end="", file=sys.stderr, flush=True)
    if shown is not None:
        print(file=sys.stderr)


def _batches(wanted: list[tuple[Any, Entry]], most: int) -> Iterator[list[tuple[Any, Entry]]]:
    """Yields the tensors in batches. Each batch spans at most ``most`` bytes of the file, or consists of one tensor."""
    batch: list[tuple[Any, Entry]] = []
    for each in wanted:
        if batch and each[1].end - batch[0][1].begin > most:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


@contextlib.contextmanager
def _reading_ahead(file: int) -> Iterator[None]:
    """Returns a context manager. While it is entered, the system reads the file ahead into memory. Reading takes no time if the file is
    already in memory.
    """
    ended = threading.Event()

    def ahead() -> None:
        for at in range(0, os.fstat(file).st_size, _AHEAD):
            if ended.is_set():
                return
            # This call is a hint. If the system ignores it, the data are read later.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, at, _AHEAD, os.POSIX_FADV_WILLNEED)

    reader = threading.Thread(target=ahead, name="mpgpu-ahead", daemon=True)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()
