# SPDX-License-Identifier: MIT OR Apache-2.0
"""Converts device and element-type names of frameworks (``"cuda:0"``, ``torch.float32``) to device numbers and type names of mpgpu."""

from __future__ import annotations

import re
import sys
from typing import Any, Optional

from ._library import HOST, whole
from .errors import BY_STATUS, ArgumentError

# --- devices ----------------------------------------------------------------------------------------------------------------
_DEVICE = re.compile(r"(?:(?:cuda|gpu):?(?P<gpu>\d+)?|cpu(?::0)?|host:?(?P<domain>\d+)?)\Z")


def device_number(value: Any, name: str = "device") -> int:
    """Returns the device number for a device that is given as ``0``, ``"cuda:0"``, ``"cpu"``, or a torch or CuPy device object. ``name`` is
    the name of the argument in error messages.
    """
    found = whole(value)
    if found is None:
        found = _named(value)
    if found is None:
        raise TypeError(
            f"{name}={value!r}: must be the number of a GPU, HOST, host(1), 'cuda:0', 'cuda', 'cpu', or a device of torch or CuPy"
        )
    if not -(2**31) <= found < 2**31:
        raise BY_STATUS["MP_ERROR_INVALID_DEVICE"](f"{name}={value}: does not exist", status="MP_ERROR_INVALID_DEVICE", argument=name)
    return found


def _named(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    kind = getattr(value, "type", None)
    if isinstance(kind, str):
        # A torch.device: its text representation is its name.
        value = str(value)
    if not isinstance(value, str):
        gpu = getattr(value, "id", None)
        return whole(gpu) if type(value).__module__.partition(".")[0] == "cupy" else None
    match = _DEVICE.match(value)
    if match is None:
        return None
    if match["gpu"] is not None:
        return int(match["gpu"])
    if value.startswith(("cuda", "gpu")):
        return _current_gpu()
    return HOST - int(match["domain"] or 0)


def _current_gpu() -> int:
    """Returns the GPU that is current on this thread in a framework that the program has imported. Returns the first GPU if there is no
    such framework.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        return int(cupy.cuda.runtime.getDevice())
    return 0


# --- element types ----------------------------------------------------------------------------------------------------------
NATIVE_ORDER = "<" if sys.byteorder == "little" else ">"
_KINDS = {"bool": "b", "uint": "u", "int": "i", "float": "f", "complex": "c"}
_SIZES = {"b": (1,), "u": (1, 2, 4, 8), "i": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
_OF_PYTHON = {int: "int64", float: "float64", complex: "complex128", bool: "bool"}
# Element types that NumPy lacks, with their sizes in bytes. torch and ml_dtypes use these names.
WITHOUT_NUMPY = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
_SHORT = re.compile(r"([<>=|]?)([biufc])(\d+)\Z")
_LONG = re.compile(r"(uint|int|float|complex)(\d+)\Z")

Elements = Optional[tuple[str, tuple[int, ...]]]
"""Element type and shape of memory. ``None`` for raw bytes, which have neither."""


def element_type(dtype: Any) -> str:
    """Returns the short name of an element type in NumPy, for example ``<f4``. If NumPy lacks the type, returns its name in torch, for
    example ``bfloat16``.
    """
    found = _known(dtype)
    if found is None:
        found = _of_numpy(dtype)
    if found is None:
        raise ArgumentError(
            f"dtype={dtype!r}: must be a name such as 'uint8', 'float32', 'f4' or 'bfloat16', or a type of NumPy or torch", argument="dtype"
        )
    return found


def _known(dtype: Any) -> str | None:
    if isinstance(dtype, str):
        return _of_text(dtype)
    if isinstance(dtype, type):
        return _of_text(_OF_PYTHON.get(dtype, dtype.__name__.rstrip("_")))
    short, name = getattr(dtype, "str", None), getattr(dtype, "name", None)
    if isinstance(short, str):
        if getattr(dtype, "hasobject", False):
            raise ArgumentError(f"dtype={dtype!r}: Python objects cannot be copied byte by byte", argument="dtype")
        return name if name in WITHOUT_NUMPY else short
    # `jax.numpy.float32` has the attribute `dtype`, and `tensorflow.float32` has a name. For torch the name is the end of the text
    # representation.
    of_numpy = getattr(dtype, "dtype", None)
    if of_numpy is not None:
        return _known(of_numpy)
    return _of_text(name if isinstance(name, str) else str(dtype).rpartition(".")[2])


def _of_text(text: str) -> str | None:
    if text in WITHOUT_NUMPY:
        return text
    if text in ("bool", "?"):
        return "|b1"
    match = _LONG.match(text)
    if match is not None:
        kind, bits = _KINDS[match[1]], int(match[2])
        return _short("", kind, bits // 8) if bits % 8 == 0 else None
    match = _SHORT.match(text)
    return _short(match[1], match[2], int(match[3])) if match is not None else None


def _short(order: str, kind: str, size: int) -> str | None:
    if size not in _SIZES[kind]:
        return None
    return f"{'|' if size == 1 else (order if order in ('<', '>') else NATIVE_ORDER)}{kind}{size}"


def _of_numpy(dtype: Any) -> str | None:
    """Returns the name of an element type that only NumPy knows, for example ``"double"``, ``"M8[s]"`` or ``"i4,f4"``. Returns ``None`` if
    NumPy is not installed.
    """
    if not isinstance(dtype, (str, type, list, dict)):
        return None
    try:
        import numpy

        found: Any = numpy.dtype(dtype)  # type: ignore[arg-type]
    except (ImportError, TypeError, ValueError, SyntaxError):
        return None
    return _known(found) if found.itemsize else None


def itemsize_of(name: str) -> int:
    """Returns the size in bytes of an element from the short name of its type, for example ``<f4``, ``<M8[s]``, ``bfloat16`` or ``<U2``
    (text of two characters).
    """
    size = WITHOUT_NUMPY.get(name)
    if size is not None:
        return size
    digits = re.match(r"\d+", name[2:])
    count = int(digits[0]) if digits is not None else 0
    return count * 4 if name[1] == "U" else count


_LETTERS = {**dict.fromkeys("bhilqn", "i"), **dict.fromkeys("BHILQN", "u"), **dict.fromkeys("efd", "f"), "?": "b"}


def elements_of_view(view: memoryview) -> Elements:
    """Returns the element type and the shape of an object that supports the buffer protocol. Fields of structures are not interpreted."""
    order, letter = (view.format[0], view.format[1:]) if view.format[:1] in "<>=@!" and len(view.format) > 1 else ("", view.format)
    if letter in ("B", "b", "c") and view.ndim == 1:
        return None
    kind = _LETTERS.get(letter)
    name = _short(">" if order == "!" else order, kind, view.itemsize) if kind is not None else None
    return (name, tuple(view.shape or ())) if name is not None else None


_OF_DLPACK = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_BFLOAT = 4


def elements_of_dlpack(code: int, bits: int, lanes: int, shape: list[int]) -> Elements:
    """Returns the element type and the shape of an object that supports DLPack, from the type codes of DLPack."""
    if lanes != 1 or bits % 8:
        return None
    kind = _OF_DLPACK.get(code)
    name = "bfloat16" if code == _BFLOAT and bits == 16 else (_short("", kind, bits // 8) if kind is not None else None)
    return (name, tuple(shape)) if name is not None else None


def elements_of(value: Any, found: Elements) -> Elements:
    """Returns the element type and the shape of any object with memory. ``found`` is the result of the object's memory protocol. It is used
    if the object has no ``dtype``.
    """
    if hasattr(value, "_mpgpu_memory"):
        own: Elements = value._elements
        return own
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return found
    if getattr(dtype, "fields", None) is not None:
        return str(dtype), tuple(shape)
    try:
        name = _known(dtype)
    except ArgumentError:
        return found
    # Types that are unknown here count as different.
    return (name, tuple(shape)) if name is not None else found


def are_alike(dst: Any, src: Any) -> bool:
    """Returns true if two arrays of one framework have the same type and shape. This is a fast check: it may return false although the
    types are equal.
    """
    one, other = getattr(dst, "dtype", None), getattr(src, "dtype", None)
    return one is not None and type(one) is type(other) and not isinstance(one, str) and bool(one == other) and dst.shape == src.shape
