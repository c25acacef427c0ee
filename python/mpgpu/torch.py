# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies of the tensors of a model in one batch: one plan copies a state dict or a list of tensors, over all suitable links.

    import mpgpu.torch
    weights = mpgpu.torch.pin(torch.load(path))          # once: into pinned host memory that all GPUs access directly
    model.load_state_dict(mpgpu.torch.to(weights, "cuda:0"), assign=True)

    weights = mpgpu.torch.load("model.safetensors", "cuda:0")   # from the file; each byte is read once
    mpgpu.torch.save(weights, "copy.safetensors")

A *tree* is a tensor, or a dict, list or tuple of trees. Functions that return a tree pass through leaves that are not tensors, such as
numbers and strings.

Objects that may contain tensors but are not trees are rejected with an error that states the remedy: a module (pass ``x.state_dict()``), an
iterator or a view of a dict (``list(x)``), a NumPy array (``torch.as_tensor(x)``), and tensors without memory of their own (sparse, nested,
quantized, on the meta device, DTensor and other wrappers).

Autograd does not record these copies. Streams, lifetimes and errors are those of :func:`mpgpu.copy`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from copy import copy as shallow_copy
from typing import Any, TypeVar, overload

import torch

from ._collective import all_gather, all_to_all, broadcast, gather, scatter
from ._context import Buffer, Context
from ._library import HOST, whole
from ._load import iter_load, load
from ._plan import Plan, Request, copy_planned
from ._save import PendingSave, save
from ._torch_devices import TorchDevice, allocating_for, host_number, torch_device
from ._trees import identity_of, pairs_of, plain, twin_of
from .errors import ArgumentError
from .typing import Device, StreamLike

__all__ = [
    "PendingSave",
    "all_gather",
    "all_to_all",
    "broadcast",
    "copy",
    "empty",
    "empty_like",
    "gather",
    "iter_load",
    "load",
    "pin",
    "plan",
    "save",
    "scatter",
    "to",
]

# Alignment in bytes of tensors that share an allocation. mp_alloc guarantees the same alignment, and no kernel needs more.
_ALIGNMENT = 256

Tree = TypeVar("Tree")


def empty(
    size: int | Sequence[int], dtype: torch.dtype | None = None, *, device: Device = HOST, context: Context | None = None
) -> torch.Tensor:
    """Allocates an uninitialised CPU tensor in pinned memory of mpgpu. Plans copy such memory over the PCIe links of all GPUs.

    Args:
        size: number of elements, or one number per dimension.
        dtype: element type. The default is torch's default type.
        device: host domain: :data:`mpgpu.HOST`, ``"cpu"`` or ``mpgpu.host(1)``.
        context: the context that allocates the memory. The default is :func:`mpgpu.default_context`.
    """
    host = host_number(device)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype={dtype!r}: must be a type of torch, for example torch.float32", argument="dtype")
    return _carve([(_extents(size), dtype or torch.get_default_dtype())], host, context)[0]


def empty_like(tree: Tree, *, device: Device = HOST, context: Context | None = None) -> Tree:
    """Allocates uninitialised pinned tensors with the shapes and types of the tensors in ``tree``, in one allocation. Tensors that share
    memory in ``tree`` also share memory in the result. The tensors in ``tree`` may be on the meta device.
    """
    host = host_number(device)
    twin: Tree = twin_of(tree, lambda tensors: _carve_like(tensors, host, context), allows_meta=True)
    return twin


def pin(tree: Tree, *, device: Device = HOST, context: Context | None = None) -> Tree:
    """Copies the tensors of a tree (a tensor, or nested dicts, lists and tuples of tensors) into pinned memory, in one allocation, and
    returns the copies. Blocks until the copies have finished.
    """
    host = host_number(device)

    def make(tensors: list[Any]) -> list[Any]:
        pinned = _carve_like(tensors, host, context)
        with torch.no_grad():
            for dst, src in zip(pinned, tensors):
                # torch makes these copies, because no GPU is involved.
                dst.copy_(src)
        return pinned

    twin: Tree = twin_of(tree, make)
    return twin


def plan(dst: Tree, src: Tree, **options: Any) -> Plan:
    """Returns one plan that copies each tensor of ``src`` into the corresponding tensor of ``dst``. ``options`` are the options of
    :class:`mpgpu.Plan`.

    Raises:
        ArgumentError: the trees differ in structure, types or shapes; a tensor is not contiguous; or an object is not a tree.
    """
    # Tensors that share memory in both trees are copied once.
    distinct = {(identity_of(one), identity_of(other)): (one, other) for one, other in pairs_of(dst, src)}
    return Plan(distinct.values(), **options)


def copy(dst: Tree, src: Tree, stream: StreamLike | None = None, *, context: Context | None = None) -> Request:
    """Copies each tensor of ``src`` into the corresponding tensor of ``dst``, as one batch. The rules for when the copy has finished are
    those of :func:`mpgpu.copy`.
    """
    return copy_planned(plan(dst, src, context=context), stream)


@overload
def to(
    tree: Tree, device: list[Any] | tuple[Any, ...], stream: StreamLike | None = None, *, context: Context | None = None
) -> list[Tree]: ...


@overload
def to(
    tree: Tree, device: TorchDevice | Mapping[Any, TorchDevice], stream: StreamLike | None = None, *, context: Context | None = None
) -> Tree: ...


def to(tree: Any, device: Any, stream: StreamLike | None = None, *, context: Context | None = None) -> Any:
    """Returns new tensors on ``device`` with the contents of the tensors in ``tree``. The copies are made as one batch.

    If ``stream`` is ``None``, the call returns when host memory is no longer read. If ``stream`` is given, later work in that stream may
    use the new tensors. Tensors that share memory in ``tree`` also share memory in the result. None of the new tensors requires a gradient.
    GPU tensors that are not contiguous are first made contiguous in torch's current stream. If ``stream`` is another stream, the call
    blocks until this has finished.

    Args:
        tree: the tensors to copy.
        device: one device for all tensors; or a list of devices; or a mapping from the keys of ``tree``, which is then a mapping, to
            devices. With a list, each device gets all tensors, and a list of trees is returned. The GPUs then forward the data to each
            other, so that each byte leaves host memory once.
        stream: a torch, CuPy or mpgpu stream.
        context: the context that executes the copies. The default is :func:`mpgpu.default_context`.

    Raises:
        ArgumentError: an object is not a tree, or a device is neither the CPU nor a CUDA device. Also the errors of :func:`mpgpu.copy`.
    """
    pairs: list[tuple[Any, Any]] = []
    # Tensors that are not contiguous are made contiguous once, for all devices.
    made_plain: dict[object, tuple[Any, Any]] = {}

    def moved(part: Any, to_device: Any) -> Any:
        where = torch_device(to_device)

        def make(tensors: list[Any]) -> list[Any]:
            with allocating_for(stream, where):
                new = [torch.empty(tuple(each.shape), dtype=each.dtype, device=where) for each in tensors]
            for each, target in zip(tensors, new):
                source, _ = made_plain.setdefault(identity_of(each), (plain(each), each))
                pairs.append((target, source))
            return new

        return twin_of(part, make)

    result: Any
    if isinstance(device, Mapping):
        if not isinstance(tree, Mapping):
            raise ArgumentError(
                f"device names a device for each key of the tree, which is a {type(tree).__name__}: pass a dict (x.state_dict())",
                argument="device",
            )
        if tree.keys() != device.keys():
            odd = sorted(map(repr, device.keys() ^ tree.keys()))
            raise ArgumentError(
                f"device names a device for each key of the tree: {', '.join(odd)} is in only one of the two", argument="device"
            )
        result = shallow_copy(tree) if isinstance(tree, dict) else {}
        for where in dict.fromkeys(device.values()):
            result.update(moved({key: tree[key] for key, own in device.items() if own == where}, where))
    elif isinstance(device, (list, tuple)):
        result = [moved(tree, where) for where in device]
    else:
        result = moved(tree, device)
    if stream is not None:
        # torch's current stream may still be creating the contiguous copies, and `stream` is not ordered with it.
        for gpu in {one.device for one, each in made_plain.values() if one.is_cuda and one.data_ptr() != each.data_ptr()}:
            torch.cuda.current_stream(gpu).synchronize()
    copy_planned(Plan(pairs, context=context), stream)
    return result


def _extents(size: Any) -> tuple[int, ...]:
    one = whole(size)
    try:
        extents = (one,) if one is not None else tuple(map(operator.index, size))
    except TypeError:
        raise TypeError(f"size={size!r}: must be a whole number, or one for each dimension") from None
    if any(extent < 0 for extent in extents):
        raise ArgumentError(f"size={size}: must not be negative", argument="size")
    return extents


def _carve_like(tensors: list[Any], device: int, context: Context | None) -> list[Any]:
    return _carve([(tuple(each.shape), each.dtype) for each in tensors], device, context)


def _carve(wanted: list[tuple[tuple[int, ...], Any]], device: int, context: Context | None) -> list[Any]:
    """Returns tensors that lie one after the other in one allocation. Each of them keeps the allocation alive."""
    offsets, total = [], 0
    for shape, dtype in wanted:
        offsets.append(total)
        total += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    if total == 0:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]
    memory = torch.frombuffer(Buffer(total, device=device, context=context).memoryview(), dtype=torch.uint8)
    return [
        memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        if math.prod(shape)
        else torch.empty(shape, dtype=dtype)
        for offset, (shape, dtype) in zip(offsets, wanted)
    ]
