# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds the memory of arrays and tensors of other libraries through the protocols that these libraries implement, for example DLPack."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Callable

from ._current import Current
from ._library import AUTO, HOST, ffi
from ._names import Elements, elements_of_dlpack, elements_of_view, itemsize_of
from .errors import ArgumentError

if TYPE_CHECKING:
    from ._context import Context

_cast = ffi.cast
_POINTER = ffi.typeof("void *")

# Device type codes of DLPack (dlpack.h): host memory, GPU memory, and host memory that GPUs can access.
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST = 1, 2, 3


class Memory:
    """Contiguous memory range, and the object that keeps it allocated."""

    __slots__ = ("context", "current", "device", "elements", "keep", "name", "nbytes", "on_gpu", "pointer", "readonly", "settle")

    def __init__(
        self,
        pointer: Any,
        nbytes: int,
        keep: Any,
        *,
        device: int = AUTO,
        readonly: bool = False,
        on_gpu: bool = False,
        current: Current | None = None,
        settle: bool = False,
        context: Context | None = None,
        elements: Elements = None,
        name: str = "",
    ) -> None:
        # Address as a C pointer. The argument may be a number.
        self.pointer = _cast(_POINTER, pointer) if isinstance(pointer, int) else pointer
        self.nbytes = nbytes
        self.keep = keep
        self.device = device
        self.readonly = readonly
        # True if only GPUs can access the memory, so that it is used only by work in streams.
        self.on_gpu = on_gpu
        # Stream for copies if the caller passes none.
        self.current = current
        # True if mpgpu must wait for the work that is now in `current`, because the producer does not order its later work in that stream.
        self.settle = settle
        self.context = context
        # Element type and shape that the memory protocol returned. Arrays have attributes for them instead.
        self.elements = elements
        # Name in error messages. Only torch tensors have one, because their storage may be resized later.
        self.name = name


def memory_of(value: Any, name: str, is_written: bool = False) -> Memory:
    """Returns the memory range of an array, tensor or other object with memory.

    Args:
        name: name of the object in error messages, for example ``dst of transfer 3``.
        is_written: True if the caller writes to the memory. Then the error message does not suggest a contiguous copy, because the data
            would be written to the copy.
    """
    own = getattr(value, "_mpgpu_memory", None)
    if own is not None:
        memory: Memory = own()
        return memory
    # Frameworks are used only if the program has imported them.
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        array = _of_array(value)
        if array is not None:
            return array
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(torch, value, name, is_written)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        if not value.flags.c_contiguous:
            raise _not_contiguous(name, value.shape, value.strides, None if is_written else "cupy.ascontiguousarray(x)")
        device = int(value.device.id)
        return Memory(int(value.data.ptr), int(value.nbytes), value.data, device=device, on_gpu=True, current=Current.cupy(device))

    # A NumPy scalar returns a copy of itself, so data written there would be lost.
    immutable = numpy is not None and isinstance(value, numpy.generic)
    # JAX arrays are computed asynchronously and must never be written.
    ready = getattr(value, "block_until_ready", None)
    if callable(ready):
        immutable = True
        ready()
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_interface(value, interface, name, immutable, is_written, on_gpu=True)
    interface = getattr(value, "__array_interface__", None)
    if interface is not None:
        return _of_interface(value, interface, name, immutable, is_written, on_gpu=False)
    buffer = _of_buffer(value, name, immutable, is_written)
    if buffer is not None:
        return buffer
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _of_dlpack(value, name, immutable, is_written)
    raise TypeError(
        f"{name} is a {type(value).__name__}: it must have __dlpack__, __cuda_array_interface__, __array_interface__ or the buffer protocol"
    )


def _of_array(array: Any) -> Memory | None:
    """Returns the memory of an array without using the array's memory protocol. This takes a fifth of the time. Returns ``None`` for arrays
    that need an error message.
    """
    flags = array.flags
    if not flags.c_contiguous or array.dtype.hasobject:
        return None
    try:
        held = ffi.from_buffer(array)
    except ValueError:
        # The buffer protocol lacks this element type.
        return None
    return Memory(held, array.nbytes, held, readonly=not flags.writeable)


def _not_contiguous(name: str, shape: Any, strides: Any, copied: str | None, assign: str = "x[...] = array") -> ArgumentError:
    """Returns the error for memory that is not contiguous. ``copied`` is a Python expression for a contiguous copy, to suggest in the
    message. It is ``None`` for memory that is written.
    """
    if copied is None:
        remedy = f"write into a contiguous array and assign that to it afterwards ({assign}), or into each contiguous part"
    else:
        remedy = f"copy {copied} instead, or copy each contiguous part separately"
    return ArgumentError(f"{name}: shape {tuple(shape)} with strides {tuple(strides)} is not contiguous in C order: {remedy}")


def _of_tensor(torch: Any, tensor: Any, name: str, is_written: bool) -> Memory:
    on_gpu = tensor.is_cuda
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or not (on_gpu or tensor.is_cpu):
        raise ArgumentError(f"{name}: {why_no_memory(torch, tensor)}")
    if not tensor.is_contiguous():
        raise _not_contiguous(name, tensor.shape, tensor.stride(), None if is_written else "x.contiguous()", "x.copy_(array)")
    if tensor.is_conj() or tensor.is_neg():
        remedy = (
            "write into x.resolve_conj().resolve_neg() and x.copy_() that afterwards"
            if is_written
            else "copy x.resolve_conj().resolve_neg() instead"
        )
        raise ArgumentError(f"{name}: a tensor whose conjugate or negative is pending: {remedy}")
    nbytes = tensor.nbytes
    # Keep the storage, not the tensor: it stays valid if the tensor gets other memory (`parameter.data = …`). Keeping an alias takes four
    # times as long.
    found = _in_storage(tensor, nbytes)
    if found is None:
        raise ArgumentError(f"{name}: {why_no_memory(torch, tensor)}", status="MP_ERROR_INVALID_POINTER")
    address, storage = found
    if not on_gpu:
        return Memory(address, nbytes, storage, name=name)
    device = tensor.get_device()
    return Memory(address, nbytes, storage, device=device, on_gpu=True, current=Current.torch(torch, device), name=name)


def _in_storage(tensor: Any, span: int) -> tuple[int, Any] | None:
    """Returns the tensor's address and its storage. Returns ``None`` if the storage has less than ``span`` bytes after that address."""
    try:
        address, storage, offset = tensor.data_ptr(), tensor.untyped_storage(), tensor.storage_offset()
        if span and (not address or (offset and offset * tensor.element_size()) + span > storage.nbytes()):
            return None
        return address, storage
    except RuntimeError:
        # Some tensors wrap other tensors.
        return None


# Expressions that return the parts of a tensor that consists of several, by its layout.
_PARTS = {
    "sparse_coo": "x.coalesce().indices() and x.coalesce().values()",
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), "x.crow_indices(), x.col_indices() and x.values()"),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), "x.ccol_indices(), x.row_indices() and x.values()"),
}


def why_no_memory(torch: Any, tensor: Any) -> str | None:
    """Returns the reason, with the remedy, why a tensor has no memory that contains exactly its elements. Returns ``None`` if it has such
    memory.
    """
    layout = str(tensor.layout).rpartition(".")[2]
    if tensor.is_nested:
        return "a nested tensor has parts of several shapes: pass its parts, x.unbind()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} has no single range of memory: pass {_PARTS.get(layout, 'x.to_dense()')}"
    if tensor.is_quantized:
        return "a quantized tensor has scales beside its elements: pass x.int_repr(), or x.dequantize()"
    of_torch = {each.__name__ for each in type(tensor).__mro__ if each.__module__.partition(".")[0] == "torch"}
    if "DTensor" in of_torch:
        return "a DTensor is spread over ranks: pass this rank's part, x.to_local()"
    if "FakeTensor" in of_torch or tensor.is_meta:
        kind = "a FakeTensor" if "FakeTensor" in of_torch else "a tensor on meta"
        return f"{kind} has a shape and no memory: pass a tensor that is allocated"
    if not (tensor.is_cuda or tensor.is_cpu):
        return f"a tensor on {tensor.device} has no memory that mpgpu can access: move it to the CPU or to a CUDA device"
    span = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    if _in_storage(tensor, span * tensor.element_size()) is not None:
        return None
    return _why_not_in_storage(torch, tensor)


def _why_not_in_storage(torch: Any, tensor: Any) -> str:
    kind = type(tensor).__name__
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return f"a {kind} has no memory of its own: pass the tensors that it wraps, {', '.join(f'x.{part}' for part in flatten()[0])}"
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:
        return f"a {kind} that wraps another tensor has no memory of its own: pass the wrapped tensor, outside of torch.func"
    return (
        f"the storage of the tensor has {storage.nbytes()} bytes and the tensor {tensor.nbytes}: storage.resize_ has released its memory, "
        "as FSDP does; resize the storage before this call"
    )


def check_storage(memory: Memory) -> None:
    """Raises an ArgumentError if ``memory`` belongs to a torch tensor whose storage has moved since ``memory`` was created."""
    # Only memory of torch tensors has a name.
    if not memory.name or not memory.nbytes:
        return
    first, address, size = memory.keep.data_ptr(), int(_cast("uintptr_t", memory.pointer)), memory.keep.nbytes()
    if not first <= address <= first + size - memory.nbytes:
        raise ArgumentError(
            f"{memory.name}: the storage of the tensor has {size} bytes at {first:#x}, and the tensor was at {address:#x}: storage.resize_ "
            "has released its memory, as FSDP does; pass the tensor again",
            status="MP_ERROR_INVALID_POINTER",
        )


class Storages:
    """Storages of the torch tensors in a plan. ``resize_`` may move a storage to other memory although the plan keeps it alive.

    ``asked`` contains, for each storage, the functions that return its current address and size. ``answers`` contains their results at the
    time when the plan was made. Comparing them takes 0.1 to 0.2 us per storage.
    """

    __slots__ = ("_names", "answers", "asked")

    def __init__(self, memories: Iterable[Memory]) -> None:
        self.asked: list[Callable[[], int]] = []
        self.answers: list[int] = []
        self._names: list[str] = []
        torch: Any = sys.modules.get("torch")
        seen: set[int] = set()
        for memory in memories:
            storage = memory.keep
            if not memory.nbytes or torch is None or not isinstance(storage, torch.UntypedStorage) or id(storage) in seen:
                continue
            seen.add(id(storage))
            self.asked += (storage.data_ptr, storage.nbytes)
            self.answers += (storage.data_ptr(), storage.nbytes())
            self._names.append(memory.name)

    def check(self) -> None:
        """Raises an ArgumentError if a storage has moved to other memory since the plan was made."""
        now = [ask() for ask in self.asked]
        if now == self.answers:
            return
        at = next(index for index, (one, other) in enumerate(zip(now, self.answers)) if one != other) // 2
        (was_at, had), (is_at, has) = self.answers[2 * at : 2 * at + 2], now[2 * at : 2 * at + 2]
        raise ArgumentError(
            f"{self._names[at]}: the storage of the tensor had {had} bytes at {was_at:#x} when the plan was made, and has {has} at "
            f"{is_at:#x} now: storage.resize_ has released the memory, as FSDP does; plan again while the tensor has memory",
            status="MP_ERROR_INVALID_POINTER",
        )


def contiguous(shape: Any, strides: Any, itemsize: int) -> bool:
    """Returns true if the elements are contiguous in C order. ``strides`` is in units of ``itemsize``."""
    if strides is None or 0 in shape:
        return True
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _of_interface(value: Any, interface: dict[str, Any], name: str, immutable: bool, is_written: bool, *, on_gpu: bool) -> Memory:
    shape = tuple(interface["shape"])
    typestr = str(interface["typestr"])
    strides = interface.get("strides")
    if typestr[1] == "O" or getattr(getattr(value, "dtype", None), "hasobject", False):
        raise ArgumentError(f"{name}: an array of Python objects holds addresses, not values: it cannot be copied byte by byte")
    if interface.get("mask") is not None:
        raise ArgumentError(f"{name}: a masked array is not copied with its mask: copy its data and its mask")
    numpy_ma: Any = sys.modules.get("numpy.ma")
    if numpy_ma is not None and isinstance(value, numpy_ma.MaskedArray):
        # The interface of a masked array returns the data without the mask.
        raise ArgumentError(f"{name}: a masked array is not copied with its mask: copy its data and its mask")
    itemsize = itemsize_of(typestr)
    if not contiguous(shape, strides, itemsize):
        copied = "a contiguous copy" if on_gpu else "numpy.ascontiguousarray(x)"
        raise _not_contiguous(name, shape, strides, None if is_written else copied)
    nbytes = itemsize
    for extent in shape:
        nbytes *= int(extent)
    # Structures are not interpreted.
    elements = (typestr, shape) if typestr[1] != "V" else None
    data = interface.get("data")
    if not isinstance(data, tuple):
        # If `data` is not a tuple, the memory is that of the buffer protocol.
        whole, offset = _of_buffer(data if data is not None else value, name, immutable, is_written), int(interface.get("offset") or 0)
        if whole is None or not 0 <= offset <= whole.nbytes - nbytes:
            raise ArgumentError(f"{name}: the data of its array interface is not a buffer with {nbytes} bytes from offset {offset}")
        start = int(_cast("uintptr_t", whole.pointer)) + offset
        return Memory(start, nbytes, whole.keep, readonly=whole.readonly, elements=elements)
    current = None
    if on_gpu and interface.get("stream") is not None:
        current = Current.fixed(int(interface["stream"]))
    return Memory(
        int(data[0] or 0),
        nbytes,
        (value, interface),
        readonly=bool(data[1]) or immutable,
        on_gpu=on_gpu,
        current=current,
        settle=current is not None,
        elements=elements,
    )


# Buffers of memoryviews by number, as long as an object uses them. They are stored here so that the garbage collector cannot reach them: in
# a reference cycle it would clear the view first, and Python before 3.12.7 then crashes (CPython issue 77894).
_of_views: dict[int, Any] = {}
_numbers = itertools.count()


def _of_buffer(value: Any, name: str, immutable: bool, is_written: bool) -> Memory | None:
    """Returns the memory of an object with the buffer protocol. Returns ``None`` for other objects."""
    try:
        view = memoryview(value)
    except (TypeError, BufferError, ValueError):
        return None
    if not view.c_contiguous:
        raise _not_contiguous(name, view.shape or (), view.strides or (), None if is_written else "bytes(x)", "x[:] = array")
    # Names of fields are removed first, because they may contain the letter O.
    if "O" in re.sub(":[^:]*:", "", view.format):
        raise ArgumentError(f"{name}: a buffer of Python objects holds addresses, not values: it cannot be copied byte by byte")
    # This keeps the buffer export alive, so that a bytearray cannot be resized.
    if type(value) is not memoryview:
        try:
            held = ffi.from_buffer(value)
            return Memory(held, view.nbytes, held, readonly=view.readonly or immutable, elements=elements_of_view(view))
        except (BufferError, ValueError):
            # Some objects export their buffer only together with its shape. A memoryview requests it in this form.
            pass
    number = next(_numbers)
    _of_views[number] = held = ffi.from_buffer(view)
    held = ffi.gc(_cast(_POINTER, held), functools.partial(_of_views.pop, number))
    return Memory(held, view.nbytes, held, readonly=view.readonly or immutable, elements=elements_of_view(view))


# --- DLPack: read in place. The capsule is kept, and frees the memory when it is released ------------------------------------
class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("owner", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_READ_ONLY = 1
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _of_dlpack(value: Any, name: str, immutable: bool, is_written: bool) -> Memory:
    kind, number = (int(part) for part in value.__dlpack_device__())
    if kind not in (_DL_CPU, _DL_CUDA, _DL_CUDA_HOST):
        raise ArgumentError(f"{name}: memory on DLPack's device type {kind} cannot be accessed: move it to the CPU or to a CUDA device")
    on_gpu = kind == _DL_CUDA
    # The producer orders its pending work before later work in the legacy default stream of its GPU.
    arguments: dict[str, Any] = {"stream": 1} if on_gpu else {}
    try:
        capsule = value.__dlpack__(**arguments, max_version=(1, 0))
    except TypeError:
        capsule = value.__dlpack__(**arguments)
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = ctypes.cast(_pointer(capsule, b"dltensor_versioned"), ctypes.POINTER(_Versioned)).contents
        if versioned.major != 1:
            raise ArgumentError(f"{name}: DLPack {versioned.major}.{versioned.minor} is not supported: use version 1")
        tensor, readonly = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _is_valid(capsule, b"dltensor"):
        tensor, readonly = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents, False
    else:
        raise ArgumentError(f"{name}: __dlpack__ of {type(value).__name__} returned no DLPack capsule")
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    strides = [tensor.strides[i] for i in range(tensor.ndim)] if tensor.strides else None
    if not contiguous(shape, strides, 1):
        raise _not_contiguous(name, shape, strides, None if is_written else "a contiguous copy")
    elements = 1
    for extent in shape:
        elements *= extent
    nbytes = (elements * tensor.dtype.bits * tensor.dtype.lanes + 7) // 8
    device = number if on_gpu else (HOST if kind == _DL_CUDA_HOST else AUTO)
    return Memory(
        (tensor.data or 0) + tensor.byte_offset,
        nbytes,
        capsule,
        device=device,
        readonly=readonly or immutable,
        on_gpu=on_gpu,
        current=Current.fixed(1, device) if on_gpu else None,
        settle=on_gpu,
        elements=elements_of_dlpack(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes, shape),
    )
