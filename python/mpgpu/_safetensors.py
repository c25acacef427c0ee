# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files of the safetensors format: opens a file, reads and writes headers, and reports why a file is invalid.

Format: eight bytes with the length of the header, the header in JSON, then the data of the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

from .errors import ArgumentError

# Size of an element in bits, by the name of its type in the format.
BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# Names of element types in torch, by their names in the format. In files that are written, tensors are sorted by type in this order.
TORCH_TYPES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    # An element of this torch type is a byte that contains two elements.
    "F4": "float4_e2m1fn_x2",
    "BOOL": "bool",
}
# Limit that the format defines, bytes.
_LONGEST_HEADER = 100_000_000
_LENGTH = struct.Struct("<Q")
# Alignment in bytes of the data in files that are written.
_ALIGNMENT = 8
_METADATA = "__metadata__"
_AGAIN = "download or write it again"
_MOST_NAMED = 3

# Files of other formats that users often pass: their first bytes, and the remedy.
_OTHERS = (
    (b"version https://git-lfs", "a Git LFS pointer in place of the file: run git lfs pull"),
    (b"PK\x03\x04", "a file of torch.save: mpgpu.torch.to(torch.load(path, mmap=True), device)"),
    (b"\x80", "a pickle, as of torch.save: mpgpu.torch.to(torch.load(path), device)"),
    (b"GGUF", "a GGUF file: convert it to safetensors"),
    (b"\x89HDF", "an HDF5 file: convert it to safetensors"),
    (b"\x93NUMPY", "a file of numpy.save: torch.from_numpy(numpy.load(path))"),
    (b"<", "a page of HTML or XML, as servers send in place of a file: download it again"),
)


class Entry(NamedTuple):
    """Description of a tensor in a file. Offsets are relative to the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading. If the path is a FIFO, does not block until a writer opens it.

    Raises:
        OSError: the file cannot be opened. The message contains the reason that the system reports.
        ArgumentError: the path is not a regular file.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    file.close()
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device"
    raise ArgumentError(f"{os.fsdecode(path)}: {kind}, which cannot be loaded: save its contents to a file first", argument="path")


def read_header(file: BinaryIO, path: str) -> dict[str, Entry]:
    """Returns the descriptions of the tensors in a file by name, in the order of their data.

    Raises:
        ArgumentError: the file has another format or is truncated, or its header is inconsistent.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(_LENGTH.size + 1)
    length = _LENGTH.unpack_from(start)[0] if len(start) > _LENGTH.size else 0
    if start[_LENGTH.size :] not in (b"{", b" ", b"\t", b"\n", b"\r") or length > _LONGEST_HEADER:
        raise _refused(path, _other_format(file, size))
    first = _LENGTH.size + length
    if size < first:
        raise _refused(path, f"it has {size} bytes, but its header alone has {first}: the file is truncated; {_AGAIN}")
    header = start[_LENGTH.size :] + file.read(length - 1)
    entries = _entries(_json_of(header, path), first, path)
    last = first
    for name, entry in entries.items():
        if entry.begin != last:
            raise _refused(path, f"tensor {name!r} begins at byte {entry.begin - first} of the data instead of {last - first}; {_AGAIN}")
        last = entry.end
        if last > size:
            raise _refused(path, f"it has {size} bytes, but tensor {name!r} ends at byte {last}: the file is truncated; {_AGAIN}")
    if last < size:
        raise _refused(path, f"it has {size - last} bytes after its last tensor, which its header does not describe; {_AGAIN}")
    return entries


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None) -> bytes:
    """Returns the start of a file, up to its first tensor. Offsets of ``entries`` are relative to the first tensor.

    Raises:
        ArgumentError: a name cannot be stored, or the header is longer than the format allows.
    """
    header: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    for name, entry in entries.items():
        if name == _METADATA:
            raise ArgumentError(f"tensor {name!r}: the format reserves this name for metadata: rename the tensor", argument="tensors")
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        text_of_error = error.object[max(error.start - 30, 0) : error.end + 10]
        raise ArgumentError(f"the name or metadata {text_of_error!r} contains a surrogate, which UTF-8 cannot encode: change it") from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise ArgumentError(
            f"the header has {len(text)} bytes, but the format allows {_LONGEST_HEADER}: save the tensors in several files",
            argument="tensors",
        )
    return _LENGTH.pack(len(text)) + text


def _refused(path: str, reason: str) -> ArgumentError:
    return ArgumentError(f"{path}: not a complete safetensors file: {reason}", argument="path")


def _json_of(header: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(header.decode("utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__} instead of an object")
    except UnicodeDecodeError as error:
        raise _refused(path, f"its header is not UTF-8 at byte {error.start}, for example in a tensor's name; {_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"its header is not JSON ({error}); {_AGAIN}") from None
    return found


def _entries(header: dict[str, Any], first: int, path: str) -> dict[str, Entry]:
    """Returns the descriptions of the tensors in a header, in the order of their offsets. Adds ``first`` to the offsets."""
    entries = []
    for name, value in header.items():
        if name == _METADATA:
            continue
        entry = _entry(value, first)
        if entry is None:
            raise _refused(path, f"its header's entry of tensor {name!r} is inconsistent: {value!r:.200}; {_AGAIN}")
        entries.append((name, entry))
    entries.sort(key=lambda each: each[1][2:])
    return dict(entries)


def _entry(value: Any, first: int) -> Entry | None:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        return None
    if type(dtype) is not str or type(shape) is not list or type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        return None
    bits = BITS.get(dtype)
    for extent in shape:
        if type(extent) is not int or extent < 0:
            return None
        bits = bits and bits * extent
    # The size of an element of an unknown type is not known.
    if bits is not None and bits != (end - begin) * 8:
        return None
    return Entry(dtype, tuple(shape), first + begin, first + end)


def _other_format(file: BinaryIO, size: int) -> str:
    """Returns the reason, with the remedy, why a file is not in the safetensors format."""
    if not size:
        return f"it is empty; {_AGAIN}"
    file.seek(0)
    start = file.read(64)
    if start.lstrip().startswith(b"{"):
        return _other_json(file)
    for magic, remedy in _OTHERS:
        if start.startswith(magic):
            return f"it is {remedy}"
    return f"it begins with {start[:9].hex(' ')}, which is no length and no header of the format; {_AGAIN}"


def _other_json(file: BinaryIO) -> str:
    file.seek(0)
    try:
        shards = sorted(set(json.loads(file.read(_LONGEST_HEADER))["weight_map"].values()))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return "it is JSON: pass the file with the tensors"
    more = ", …" if len(shards) > _MOST_NAMED else ""
    named = ", ".join(shards[:_MOST_NAMED])
    return f"it is the index of a model in {len(shards)} files: rename it to *.safetensors.index.json, or load its files: {named}{more}"
