# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies of blocks by index, without a plan: pages of a key-value cache, rows of a table."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Callable, NamedTuple

from . import _library
from ._context import Buffer, Context
from ._current import LAST_DEFAULT, Current, given, make_current
from ._dropped import collect
from ._dropped import held as _dropped
from ._library import AUTO, NULL, SWITCH, check, failure, ffi, lib, sized, whole
from ._memory import Memory, contiguous, memory_of
from ._names import NATIVE_ORDER, elements_of, itemsize_of
from ._plan import Request, _check_memory, _context_of, _entered, enqueue_in_all
from ._streams import Stream
from .errors import ArgumentError, Error
from .typing import BlockArrays, BlockIndices, StreamLike

_new = ffi.new
_cast = ffi.cast
_copy_blocks = lib.mp_copy_blocks
# C types, which are looked up once because each look-up parses the name.
_REQUEST = ffi.typeof("mp_request_t *")
_STREAM = ffi.typeof("mp_stream_t")
_BLOCKS = ffi.typeof("mp_blocks_t *")
_BLOCKS_BYTES = ffi.sizeof("mp_blocks_t")
_ADDRESSES = ffi.typeof("uintptr_t[]")
_ADDRESS = ffi.typeof("uintptr_t")
_DESTINATIONS = ffi.typeof("void **")
_SOURCES = ffi.typeof("const void **")
_POINTER = ffi.typeof("void *")

# Size of an index in bytes, and true if the type is signed. The key is NumPy's name of the type.
_INTEGERS = {f"{NATIVE_ORDER}{kind}{size}": (size, kind == "i") for kind in "iu" for size in (4, 8)}
# Largest number of blocks for which a negative 32-bit index, read as an unsigned number, is out of range.
_ALL_NARROW = 2**31


_Form = tuple[int, int, int]
"""Number of blocks in an array, bytes of a block, and bytes from one block to the next."""


class _Used:
    """Resources that a copy uses: objects to keep alive, streams of frameworks, contexts."""

    __slots__ = ("currents", "gpu", "keep", "memories", "names", "tensor_on_gpu", "torch")

    def __init__(self) -> None:
        self.torch: Any = sys.modules.get("torch")
        self.keep: list[Any] = []
        self.currents: list[Current] = []
        # Memory of all arrays except plain torch tensors, and the names of these arrays.
        self.memories: list[Memory] = []
        self.names: list[str] = []
        # First GPU that has an array.
        self.gpu: int | None = None
        # Argument that is or contains a torch tensor in GPU memory.
        self.tensor_on_gpu = ""

    def add(self, memory: Memory, name: str) -> None:
        self.keep.append(memory.keep)
        self.memories.append(memory)
        self.names.append(name)
        if self.gpu is None and memory.device >= 0 and memory.device != AUTO:
            self.gpu = memory.device
        if memory.current is not None and memory.current not in self.currents:
            self.currents.append(memory.current)

    def add_tensor_on_gpu(self, device: int, name: str) -> None:
        self.tensor_on_gpu = name
        if self.gpu is None:
            self.gpu = device
        current = Current.torch(self.torch, device)
        if current not in self.currents:
            self.currents.append(current)


class _End:
    """Arrays of one end of a copy, one for each layer. All have the same form."""

    __slots__ = ("addresses", "block", "blocks", "name", "stride")

    def __init__(self, arrays: BlockArrays, name: str, is_written: bool, used: _Used) -> None:
        torch = used.torch
        form: _Form | None = None
        addresses: list[int] = []
        has_layers = isinstance(arrays, (list, tuple))
        layers: Any = arrays if has_layers else (arrays,)
        for each in layers:
            kind = type(each)
            found = None
            if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter):
                found = _of_tensor(each, name, used)
            if found is None:
                found = _of_array(each, f"{name}[{len(addresses)}]" if has_layers else name, is_written, used)
            if form is None:
                form = found[1]
            elif found[1] != form:
                raise _unlike(name, len(addresses), found[1], form)
            addresses.append(found[0])
        self.name = name
        self.addresses = addresses
        self.blocks, self.block, self.stride = form if form is not None else (0, 0, 0)


def _unlike(name: str, layer: int, found: _Form, first: _Form) -> ArgumentError:
    what = ("blocks", "bytes in a block", "bytes from one block to the next")
    at = next(at for at in range(3) if found[at] != first[at])
    return ArgumentError(
        f"{name}[{layer}] has {found[at]} {what[at]} and {name}[0] has {first[at]}: copy layers that differ in separate calls",
        argument=name,
    )


def _of_tensor(tensor: Any, name: str, used: _Used) -> tuple[int, _Form] | None:
    """Returns the address and the form of a torch tensor. Returns ``None`` for tensors that need an error message, and for those without
    elements. A call for a cache of 32 layers has 64 tensors, so this function calls torch as rarely as possible.
    """
    try:
        # `len` takes three times as long as `shape`.
        shape, nbytes, address, storage, device = (
            tensor.shape,
            tensor.nbytes,
            tensor.data_ptr(),
            tensor.untyped_storage(),
            tensor.get_device(),
        )
        blocks = shape[0]
    except (RuntimeError, IndexError):
        # Sparse tensors, and tensors that wrap other tensors, have no storage. Scalars have no dimensions.
        return None
    if not address or not nbytes or tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    block = stride = nbytes // blocks
    if not tensor.is_contiguous():
        strides = tensor.stride()
        stride = strides[0] * tensor.element_size()
        if stride < block or not contiguous(shape[1:], strides[1:], 1):
            return None
        nbytes = (blocks - 1) * stride + block
    offset = tensor.storage_offset()
    if (offset and offset * tensor.element_size()) + nbytes > storage.nbytes():
        return None
    if device >= 0:
        if not tensor.is_cuda:
            return None
        used.add_tensor_on_gpu(device, name)
    used.keep.append(storage)
    return address, (blocks, block, stride)


class _First:
    """First block of an object that supports only NumPy's or Numba's array interface."""

    def __init__(self, value: Any, protocol: str, interface: dict[str, Any]) -> None:
        self._value = value
        self.dtype = getattr(value, "dtype", None)
        setattr(self, protocol, interface)


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    # In bytes. `None` if all elements are contiguous.
    strides: tuple[int, ...] | None
    itemsize: int
    # Name of the array interface that supplied the layout. Empty if slices of the array are views.
    protocol: str = ""


def _layout_of(torch: Any, value: Any) -> _Layout | None:
    """Returns shape and strides of an array that may have gaps between its blocks. Returns ``None`` for other objects with memory."""
    if isinstance(value, Buffer):
        return _Layout(value.shape, None, value.itemsize)
    if hasattr(value, "_mpgpu_memory"):
        return None
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return None
        size = value.element_size()
        return _Layout(tuple(value.shape), tuple(each * size for each in value.stride()), size)
    for module in ("numpy", "cupy"):
        framework: Any = sys.modules.get(module)
        if framework is not None and isinstance(value, framework.ndarray):
            return _Layout(value.shape, value.strides, value.itemsize)
    for protocol in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(value, protocol, None)
        if interface is not None:
            strides = interface.get("strides")
            return _Layout(
                tuple(interface["shape"]), tuple(strides) if strides is not None else None, itemsize_of(str(interface["typestr"])), protocol
            )
    return None


def _of_array(value: Any, name: str, is_written: bool, used: _Used) -> tuple[int, _Form]:
    """Returns the address and the form of any array."""
    layout = _layout_of(used.torch, value)
    shape: Any
    if layout is None or layout.strides is None or contiguous(layout.shape, layout.strides, layout.itemsize):
        memory = memory_of(value, name, is_written)
        shape = layout.shape if layout is not None else _shape_of(value, memory)
        if not shape:
            raise ArgumentError(f"{name} has no dimensions: its first dimension must count the blocks")
        block = stride = memory.nbytes // shape[0] if shape[0] else 0
        if not shape[0] and layout is not None:
            block = stride = layout.itemsize
            for extent in shape[1:]:
                block = stride = block * extent
    else:
        shape, strides = layout.shape, layout.strides
        if not contiguous(shape[1:], strides[1:], layout.itemsize):
            raise ArgumentError(
                f"{name}: a block of shape {shape[1:]} with strides {strides[1:]} bytes is not contiguous: all dimensions after the first "
                + ("must be contiguous in C order" if is_written else "must be contiguous in C order; copy x.contiguous() of it instead")
            )
        if layout.protocol:
            memory = memory_of(
                _First(value, layout.protocol, {**getattr(value, layout.protocol), "shape": (1, *shape[1:])}), name, is_written
            )
        else:
            memory = memory_of(value[:1], name, is_written)
        block, stride = memory.nbytes, strides[0]
        if stride < block:
            raise ArgumentError(
                f"{name}: its blocks are {stride} bytes apart and have {block} bytes: pass an array whose blocks do not overlap and lie in "
                "ascending order"
            )
    if is_written and memory.readonly:
        raise ArgumentError(f"{name} is read-only: copy into memory that may be written")
    used.add(memory, name)
    return int(_cast(_ADDRESS, memory.pointer)), (int(shape[0]), block, stride)


def _shape_of(value: Any, memory: Memory) -> tuple[int, ...]:
    """Returns the shape of a contiguous object with memory. The elements of raw bytes are bytes."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    return memory.elements[1] if memory.elements is not None else (memory.nbytes,)


class _Index:
    """List of indices as the library reads it."""

    __slots__ = ("count", "is_late", "is_signed", "keep", "name", "pointer", "width")

    def __init__(self, name: str, pointer: Any, count: int, width: int, is_signed: bool, is_late: bool, keep: Any) -> None:
        self.name = name
        self.pointer = pointer
        self.count = count
        # Bytes of an index, 4 or 8.
        self.width = width
        self.is_signed = is_signed
        # True if the list is in GPU memory, where it is read when the copy runs.
        self.is_late = is_late
        self.keep = keep

    def values(self) -> Any:
        """Returns the indices of a list in host memory, as a C array."""
        return _cast(f"{'' if self.is_signed else 'u'}int{8 * self.width}_t *", self.pointer)[0 : self.count]

    def as_wide_as(self, width: int) -> _Index:
        """Returns a list in host memory with the same indices, of ``width`` bytes each."""
        values = list(self.values())
        try:
            found = array.array("q" if width == 8 else "i", values)
        except OverflowError:
            at = next(at for at, value in enumerate(values) if not -(2 ** (8 * width - 1)) <= value < 2 ** (8 * width - 1))
            raise ArgumentError(
                f"{self.name}[{at}]={values[at]}: does not fit into {8 * width} bits, the size of the indices in the other list: "
                "pass the other list with 64-bit indices",
                argument=self.name,
            ) from None
        return _of_numbers(self.name, found)

    def check_signs(self) -> None:
        """Raises an ArgumentError if an index of a list in host memory is negative."""
        if self.is_late or not self.is_signed:
            return
        for at, value in enumerate(self.values()):
            if value < 0:
                raise ArgumentError(
                    f"{self.name}[{at}]={value}: must not be negative; indices count blocks from 0 up", argument=self.name
                ) from None


def _of_numbers(name: str, numbers: array.array[int]) -> _Index:
    address, count = numbers.buffer_info()
    return _Index(name, _cast(_POINTER, address), count, numbers.itemsize, True, False, numbers)


def _index_of(value: Any, name: str, used: _Used) -> _Index | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple, range)):
        return _of_list(value, name)
    torch = used.torch
    if torch is not None and isinstance(value, torch.Tensor):
        found = _of_index_tensor(torch, value, name, used) if type(value) is torch.Tensor else None
        if found is not None:
            return found
        if value.is_cpu and value.layout is torch.strided:
            value = value.contiguous()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        width, is_signed = _integers(value, name, value.dtype.str, value.shape)
        held = ffi.from_buffer(value if value.flags.c_contiguous else numpy.ascontiguousarray(value))
        # On the host backend, the list may be memory of a virtual GPU, which is read when the copy runs.
        used.keep.append(held)
        return _Index(name, held, len(value), width, is_signed, False, held)
    try:
        memory = memory_of(value, name)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(value).__name__}: it must be a list of whole numbers, or an array of integers of 32 or 64 bits"
        ) from None
    elements = elements_of(value, memory.elements)
    kind, shape = elements if elements is not None else ("raw bytes", (memory.nbytes,))
    width, is_signed = _integers(value, name, kind, shape)
    used.add(memory, name)
    return _Index(name, memory.pointer, shape[0], width, is_signed, memory.on_gpu, memory.keep)


def _of_index_tensor(torch: Any, tensor: Any, name: str, used: _Used) -> _Index | None:
    """Returns the index list in a torch tensor. Returns ``None`` for tensors that must be copied, or that need an error message."""
    dtype = tensor.dtype
    width = 8 if dtype is torch.int64 else 4 if dtype is torch.int32 else 0
    try:
        if not width or tensor.dim() != 1 or tensor.is_nested or not tensor.is_contiguous():
            return None
        count, address, storage, device = tensor.numel(), tensor.data_ptr(), tensor.untyped_storage(), tensor.get_device()
    except RuntimeError:
        return None
    if (tensor.storage_offset() + count) * width > storage.nbytes() or (count and not address):
        return None
    if device >= 0:
        if not tensor.is_cuda:
            return None
        used.add_tensor_on_gpu(device, name)
    used.keep.append(storage)
    return _Index(name, _cast(_POINTER, address), count, width, True, device >= 0, storage)


def _integers(value: Any, name: str, kind: str, shape: Sequence[int]) -> tuple[int, bool]:
    found = _INTEGERS.get(kind)
    if found is None:
        raise ArgumentError(
            f"{name} has elements of type {getattr(value, 'dtype', kind)}: convert it to integers of 32 or 64 bits, for example int64",
            argument=name,
        )
    if len(shape) != 1:
        raise ArgumentError(f"{name} has shape {tuple(shape)}: an index list must have one dimension", argument=name)
    return found


def _of_list(numbers: Sequence[Any], name: str) -> _Index:
    try:
        # A list of booleans is a mask, not an index list.
        if not (numbers and isinstance(numbers[0], bool)):
            return _of_numbers(name, array.array("q", numbers))
    except (TypeError, OverflowError):
        pass
    for at, number in enumerate(numbers):
        if whole(number) is None:
            raise TypeError(f"{name}[{at}]={number!r}: must be a whole number, the index of a block")
        if not -(2**63) <= number < 2**63:
            raise ArgumentError(f"{name}[{at}]={number}: must be below 2**63", argument=name)
    raise TypeError(f"{name}: must be a list of whole numbers")


def _matched(dst: _Index | None, src: _Index | None, into: _End, of: _End) -> tuple[_Index | None, _Index | None, int]:
    """Returns both index lists with indices of one width, and the number of blocks to copy in each layer."""
    if dst is not None and src is not None and dst.count == src.count and dst.width == src.width:
        # The usual case.
        if 0 < into.blocks <= _ALL_NARROW and 0 < of.blocks <= _ALL_NARROW:
            return dst, src, dst.count
    indices = [dst, src]
    for at, (index, end) in enumerate(zip(indices, (into, of))):
        if index is not None and index.width == 4 and index.is_signed and end.blocks > _ALL_NARROW:
            if index.is_late:
                raise ArgumentError(
                    f"{index.name} has 32 bits and is in GPU memory, and {end.name} has {end.blocks} blocks: pass indices of 64 bits",
                    argument=index.name,
                )
            indices[at] = index.as_wide_as(8)
    dst, src = indices
    if dst is not None and src is not None:
        if dst.count != src.count:
            raise ArgumentError(f"dst_index has {dst.count} indices and src_index has {src.count}: both must have the same length")
        if dst.width != src.width:
            if dst.is_late and src.is_late:
                raise ArgumentError(
                    f"dst_index has {8 * dst.width} bits and src_index has {8 * src.width}: convert one of them; lists in GPU memory must "
                    "have indices of the same size"
                )
            # The list in GPU memory cannot be converted here.
            width = dst.width if dst.is_late else src.width if src.is_late else 8
            dst = dst if dst.width == width else dst.as_wide_as(width)
            src = src if src.width == width else src.as_wide_as(width)
    if dst is None and src is None and into.blocks != of.blocks:
        raise ArgumentError(
            f"dst has {into.blocks} blocks and src has {of.blocks}: pass index lists, or arrays with the same number of blocks"
        )
    for index, end, other in ((dst, into, src), (src, of, dst)):
        if index is None and other is not None and other.count > end.blocks and end.addresses:
            raise ArgumentError(
                f"{other.name} has {other.count} indices and {end.name} has {end.blocks} blocks: pass {end.name}_index, or fewer indices"
            )
        if index is not None and index.count and not end.blocks and end.addresses:
            raise ArgumentError(f"{index.name} has {index.count} indices and {end.name} has no blocks: pass an array with blocks")
    index = dst if dst is not None else src
    return dst, src, index.count if index is not None else into.blocks


def _options(multiprocessors: int | None, paced: bool | None) -> Any:
    options = sized("mp_piece_options_t *")
    if multiprocessors is not None:
        number = whole(multiprocessors)
        if number is None:
            raise TypeError(f"multiprocessors={multiprocessors!r}: must be a whole number, or None for the default")
        if not 1 <= number < 2**32:
            raise ArgumentError(f"multiprocessors={number}: must be from 1 to {2**32 - 1}", argument="multiprocessors")
        options.multiprocessors = number
    options.paced = _library.choice("paced", SWITCH, paced)
    return options


def _explained(error: Error, indices: tuple[_Index | None, _Index | None]) -> Error:
    """Returns the error of the library. Raises an ArgumentError instead if the reason is a negative index, which the library reads as a
    large number.
    """
    if error.status == "MP_ERROR_INVALID_ARGUMENT":
        for index in indices:
            if index is not None:
                index.check_signs()
    return error


def _enqueue(context: Context, used: _Used, stream: StreamLike | None, begin: Callable[[Any], Request]) -> Request:
    """Calls ``begin`` with the stream of the copy. :meth:`Plan.execute` describes which stream this is."""
    is_on_gpus = context._backend == "cuda"
    for memory in used.memories:
        if is_on_gpus and memory.settle and memory.current is not None:
            # The library that produced the array does not order its work with other streams.
            number = memory.current.handle()
            with _entered(memory.current.here(number)):
                check(lib.mp_stream_synchronize(context._handle, _cast(_STREAM, number)))
    here: AbstractContextManager[Any] | None = None
    if stream is None:
        currents = list({current.key: current for current in used.currents}.values()) if is_on_gpus else []
        if not currents:
            return begin(context._own_stream(used.gpu if used.gpu is not None else (0 if context.gpus else _library.HOST)))
        if len(currents) > 1:
            return _enqueue_in_all(context, sorted(currents, key=lambda current: not current.is_known), begin)
        number = currents[0].handle()
        here = currents[0].here(number) if number <= LAST_DEFAULT else None
        handle = _cast(_STREAM, number)
    elif type(stream) is Stream:
        if stream._context is not context:
            raise ArgumentError("the stream is not a stream of this context: make it with the context that copies", argument="stream")
        handle = stream._handle
    else:
        number, device = given(stream)
        handle = _cast(_STREAM, number)
        here = make_current(device) if device is not None else None
    if here is None:
        return begin(handle)
    with here:
        return begin(handle)


def _enqueue_in_all(context: Context, currents: list[Current], begin: Callable[[Any], Request]) -> Request:
    events: list[Any] = []
    try:
        return enqueue_in_all(context, currents, events, begin)
    finally:
        # Streams that already wait for an event are not affected by its destruction.
        for event in events:
            lib.mp_event_destroy(context._handle, event)


def copy_blocks(
    dst: BlockArrays,
    src: BlockArrays,
    dst_index: BlockIndices | None = None,
    src_index: BlockIndices | None = None,
    *,
    stream: StreamLike | None = None,
    multiprocessors: int | None = None,
    paced: bool | None = None,
    context: Context | None = None,
) -> Request:
    """Copies blocks between arrays by one kernel, without a plan: pages of a key-value cache, rows of an embedding table. Block
    ``dst_index[i]`` of ``dst`` receives block ``src_index[i]`` of ``src``.

    The copy runs after all earlier work in the stream and before all later work. Does not block. Wait for the returned request, or for the
    stream, before the CPU uses the data. The request keeps the memory of all arrays and index lists alive until the copy has finished.

    Args:
        dst: the destination: an array whose first dimension counts the blocks. All further dimensions must be contiguous; there may be gaps
            between blocks. Or a list of such arrays, one for each layer, with the same number of blocks, block size and stride. Arrays are
            in GPU memory or in pinned host memory: :func:`empty`, :class:`Registered`, or pinned memory of a framework.
        src: the source, an array or a list like ``dst``. Blocks have the same size in bytes; their types and shapes may differ.
        dst_index: indices of destination blocks, used for each layer: a list of whole numbers, or a one-dimensional array of integers of 32
            or 64 bits. Lists in host memory are read and checked before the call returns. Lists in GPU memory are read when the copy runs;
            blocks with an index out of range are then not copied, and waiting raises ArgumentError. ``None`` for blocks 0, 1, 2 and so on.
        src_index: indices of source blocks, a list like ``dst_index``. If both are given, they must have the same length. Two lists in GPU
            memory must have integers of the same size.
        stream: the stream of the copy, in any form that :meth:`Plan.execute` accepts. ``None`` selects the current torch or CuPy stream if
            torch or CuPy arrays in GPU memory are among the arguments, otherwise mpgpu's own stream.
        multiprocessors: maximum number of multiprocessors that the kernel occupies. ``None`` selects the value of
            ``MPGPU_KERNEL_BLOCKS``.
        paced: True if writes to host memory are paced: each group of threads of the kernel waits until its stores have arrived before it
            stores more. Without pacing, writes slow down other work of the GPU. ``None`` selects the value of ``MPGPU_PACED_WRITES``, which
            is on by default.
        context: the context that executes the copy. By default it is the context of the :class:`Buffer` objects among the arguments, then
            that of ``stream``, then :func:`default_context`.

    Raises:
        ArgumentError: sizes or lengths differ, a block is not contiguous, an index is out of range, or memory is pageable or read-only. The
            message contains the position and the value.
        TypeError: an object has no memory, or an index is not a whole number.
        NotSupported: the GPU of the stream cannot access an array, or the stream is being captured and an index list is given.

    If a destination block is listed twice, each of its bytes comes from one of the two sources. May be called from any thread.
    """
    if _dropped:
        collect(2)
    used = _Used()
    into, of = _End(dst, "dst", True, used), _End(src, "src", False, used)
    layers = len(into.addresses)
    if layers != len(of.addresses):
        raise ArgumentError(f"dst has {layers} arrays and src has {len(of.addresses)}: pass one of each for every layer")
    if into.block != of.block:
        raise ArgumentError(f"a block of dst has {into.block} bytes and a block of src {of.block}: both must have the same size")
    to, at, count = _matched(_index_of(dst_index, "dst_index", used), _index_of(src_index, "src_index", used), into, of)
    # The C struct contains only the addresses of these objects, so they must exist until the call returns.
    destinations, sources = _new(_ADDRESSES, into.addresses), _new(_ADDRESSES, of.addresses)
    blocks = _new(
        _BLOCKS,
        {
            "size": _BLOCKS_BYTES,
            "dst": _cast(_DESTINATIONS, destinations),
            "src": _cast(_SOURCES, sources),
            "layers": layers,
            "block_bytes": into.block,
            "count": count,
            "dst_stride": into.stride,
            "src_stride": of.stride,
            "dst_blocks": into.blocks,
            "src_blocks": of.blocks,
            "dst_index": NULL if to is None else to.pointer,
            "src_index": NULL if at is None else at.pointer,
            "index_bytes": to.width if to is not None else at.width if at is not None else 8,
        },
    )
    options = NULL if multiprocessors is None and paced is None else _options(multiprocessors, paced)
    if context is None and type(stream) is Stream and (not used.memories or all(memory.context is None for memory in used.memories)):
        context = stream._context
    if context is None or used.memories:
        context = _context_of(used.memories, context)
        for memory, name in zip(used.memories, used.names):
            _check_memory(context, memory, name)
    if used.tensor_on_gpu and context._backend == "host":
        _check_memory(context, Memory(0, 0, None, on_gpu=True), used.tensor_on_gpu)
    copied_in = context

    def begin(handle: Any) -> Request:
        request = _new(_REQUEST)
        made = Request((used.keep, copied_in), request)
        status = _copy_blocks(copied_in._handle, blocks, options, handle, request)
        if status:
            made._held = None
            raise _explained(failure(status), (to, at))
        return made

    if type(stream) is Stream and stream._context is context and not used.memories:
        return begin(stream._handle)
    return _enqueue(context, used, stream, begin)
