# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of a model in one batch: a state dict or a list of tensors is moved by one plan, over all links that help.

    import mpgpu.torch
    weights = mpgpu.torch.pin(torch.load(path))          # once: into host memory that every GPU reads directly
    model.load_state_dict(mpgpu.torch.to(weights, "cuda:0"), assign=True)

    weights = mpgpu.torch.load("model.safetensors", "cuda:0")   # from the file, each byte once

A *tree* is a tensor, or a dict, list or tuple of trees; what is no tensor stays as it is. Autograd does not see these copies. Streams,
lifetimes and errors are those of :func:`mpgpu.copy`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy as shallow_copy
from typing import Any, Callable, TypeVar, Union, overload

import torch

from ._collective import all_gather, all_to_all, broadcast, gather, scatter
from ._context import Buffer, Context
from ._library import HOST
from ._names import device_number
from ._plan import Plan, Request, copy_planned
from ._streams import LAST_DEFAULT, given
from .errors import ArgumentError
from .typing import Device, StreamLike

__all__ = [
    "all_gather",
    "all_to_all",
    "broadcast",
    "copy",
    "empty",
    "empty_like",
    "gather",
    "load",
    "pin",
    "plan",
    "scatter",
    "to",
]

# Where tensors begin in an allocation that they share: what mp_alloc itself guarantees, and more than any kernel asks for.
_ALIGNMENT = 256
# Tensors that load() moves as one batch, and what is read ahead of the file at a time, bytes.
_BATCH = 4 << 30
_AHEAD = 64 << 20

Tree = TypeVar("Tree")
TorchDevice = Union[Device, torch.device]


def empty(
    size: int | tuple[int, ...], dtype: torch.dtype | None = None, *, device: Device = HOST, context: Context | None = None
) -> torch.Tensor:
    """A CPU tensor in pinned memory of mpgpu, which plans spread over all GPUs' PCIe links. Its contents are undefined.

    Args:
        size: number of elements, or one for each dimension.
        dtype: by default torch's default type.
        device: host domain, :data:`mpgpu.HOST`, ``"cpu"`` or ``mpgpu.host(1)``.
        context: whose memory; by default :func:`mpgpu.default_context`.
    """
    host = _host(device)
    shape = (size,) if isinstance(size, int) else tuple(size)
    return _carve([(shape, dtype or torch.get_default_dtype())], host, context)[0]


def empty_like(tree: Tree, *, device: Device = HOST, context: Context | None = None) -> Tree:
    """Pinned tensors of the same shapes and types, in one allocation. Tensors that are the same memory in ``tree`` are so in the result."""
    host = _host(device)
    twin: Tree = _twin(tree, lambda tensors: _carve([(tuple(each.shape), each.dtype) for each in tensors], host, context))
    return twin


def pin(tree: Tree, *, device: Device = HOST, context: Context | None = None) -> Tree:
    """The tensors of a tree in pinned memory, in one allocation. Returns when they are there."""
    pinned = empty_like(tree, device=device, context=context)
    with torch.no_grad():
        for dst, src in zip(_tensors(pinned), _tensors(tree)):
            # By torch: no GPU is concerned.
            dst.copy_(src)
    return pinned


def plan(dst: Tree, src: Tree, **options: Any) -> Plan:
    """One plan that copies each tensor of ``src`` into the tensor at its place in ``dst``; ``options`` are those of :class:`mpgpu.Plan`.

    Raises:
        ArgumentError: trees of different form, types or shapes that differ, tensors that are not contiguous.
    """
    # What is tied in both trees is one copy.
    distinct = {(_identity(one), _identity(other)): (one, other) for one, other in _pairs(dst, src, "")}
    return Plan(distinct.values(), **options)


def copy(dst: Tree, src: Tree, stream: StreamLike | None = None, *, context: Context | None = None) -> Request:
    """Copy each tensor of ``src`` into the tensor at its place in ``dst``, as one batch. Finished on return as :func:`mpgpu.copy` is."""
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
    """New tensors on ``device`` with the contents of those of ``tree``, moved as one batch.

    Without a ``stream``, returns when host memory is no longer read; with one, work of that stream may use the tensors. Tensors that are
    the same memory in ``tree`` are so in the result. None of them requires a gradient. Those of a GPU that are not contiguous are made so
    in torch's current stream first, for which the host waits where ``stream`` is another.

    Args:
        tree: what is moved.
        device: for all of it; or a list of devices, each of which gets all of it, and a list of trees comes back: GPUs pass on what they
            have, so that each byte leaves host memory once; or a mapping from the keys of ``tree``, itself a mapping, to devices.
        stream: a stream of torch, CuPy or mpgpu.
        context: which moves them; by default :func:`mpgpu.default_context`.
    """
    pairs: list[tuple[Any, Any]] = []
    # What is not contiguous is made so once, for whichever devices.
    plain: dict[object, tuple[Any, Any]] = {}

    def moved(part: Any, to_device: Any) -> Any:
        where = _device(to_device)

        def make(tensors: list[Any]) -> list[Any]:
            with _allocating_for(stream, where):
                new = [torch.empty(tuple(each.shape), dtype=each.dtype, device=where) for each in tensors]
            for each, target in zip(tensors, new):
                source, _ = plain.setdefault(_identity(each), (_plain(each), each))
                pairs.append((target, source))
            return new

        return _twin(part, make)

    result: Any
    if isinstance(device, Mapping):
        if not isinstance(tree, Mapping) or tree.keys() != device.keys():
            odd = sorted(map(repr, device.keys() ^ tree.keys())) if isinstance(tree, Mapping) else [type(tree).__name__]
            raise ArgumentError(f"device names a device for each key of the tree: {', '.join(odd)} is in one alone", argument="device")
        result = shallow_copy(tree) if isinstance(tree, dict) else {}
        for where in dict.fromkeys(device.values()):
            result.update(moved({key: tree[key] for key, own in device.items() if own == where}, where))
    elif isinstance(device, (list, tuple)):
        result = [moved(tree, where) for where in device]
    else:
        result = moved(tree, device)
    if stream is not None:
        # What had to be made contiguous is in the making in torch's current stream, of which `stream` knows nothing.
        for gpu in {one.device for one, each in plain.values() if one.is_cuda and one.data_ptr() != each.data_ptr()}:
            torch.cuda.current_stream(gpu).synchronize()
    copy_planned(Plan(pairs, context=context), stream)
    return result


def load(
    path: str | os.PathLike[str],
    device: TorchDevice | Mapping[str, TorchDevice],
    *,
    progress: bool = False,
    context: Context | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, on ``device``: straight from the file's pages, over all links that help, each byte once.
    Needs the package safetensors.

    Args:
        path: the file. It must keep its length until the call returns: what is missing then is an error, and nothing is returned.
        device: for all tensors; or a mapping from names to devices, and what it does not name is not read.
        progress: whether to write to stderr how far it is.
        context: which moves them; by default :func:`mpgpu.default_context`.

    Raises:
        ArgumentError: no safetensors file, one that is cut short, a type that torch lacks, a name or a device that is not there.
        OSError: the file cannot be opened.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ArgumentError("mpgpu.torch.load needs the package safetensors: pip install safetensors") from error
    path = os.fspath(path)
    places = {name: _device(where) for name, where in device.items()} if isinstance(device, Mapping) else None
    only = _device(device) if places is None else None
    with open(path, "rb") as file:
        try:
            opened: Any = safetensors.safe_open(path, framework="pt")
        except Exception as error:
            raise ArgumentError(f"{path}: no whole safetensors file ({error}): download or write it again") from error
        with opened:
            found = list(opened.keys())
            if places is None:
                places = dict.fromkeys(found, only)
            for name in places:
                if name not in found:
                    raise ArgumentError(f"{path}: no tensor {name!r}, which `device` names; it has {len(found)}, the first is {found[:1]}")
            mapped: dict[str, Any] = {}
            for name in places:
                try:
                    # Its memory is the file's: nothing is read yet.
                    mapped[name] = opened.get_tensor(name)
                except Exception as error:
                    raise ArgumentError(f"{path}: tensor {name!r}: this torch ({torch.__version__}) has no such type ({error})") from error
            with _reading_ahead(file.fileno()):
                return _load(mapped, places, context, f"{path}: " if progress else None)


def _load(mapped: dict[str, Any], places: Mapping[str, Any], context: Context | None, shown: str | None) -> dict[str, Any]:
    made = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=places[name]) for name, tensor in mapped.items()}
    total, done, begin = sum(each.nbytes for each in mapped.values()), 0, time.monotonic()
    batch: list[tuple[Any, Any]] = []
    waiting = 0
    # As they lie in the file, which is read in this order.
    for number, name in enumerate(sorted(mapped, key=lambda name: int(mapped[name].data_ptr())), 1):
        batch.append((made[name], mapped[name]))
        waiting += mapped[name].nbytes
        if waiting < (_BATCH >> 2 if shown else _BATCH) and number < len(mapped):
            continue
        # A file is read once: nothing is tried for the next time.
        Plan(batch, adapt=False, context=context).execute().synchronize()
        done, batch, waiting = done + waiting, [], 0
        if shown is not None:
            rate = done / max(time.monotonic() - begin, 1e-9) * 1e-9
            print(f"\r{shown}{done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.1f} GB/s", end="", file=sys.stderr, flush=True)
    if shown is not None:
        print(file=sys.stderr)
    return made


@contextlib.contextmanager
def _reading_ahead(file: int) -> Iterator[None]:
    """Has the system read a file ahead, which takes no time where it is in memory; ends with the block."""
    ended = threading.Event()

    def ahead() -> None:
        for at in range(0, os.fstat(file).st_size, _AHEAD):
            if ended.is_set():
                return
            os.posix_fadvise(file, at, _AHEAD, os.POSIX_FADV_WILLNEED)

    reader = threading.Thread(target=ahead, name="mpgpu-ahead", daemon=True)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()


def _host(device: Device) -> int:
    number = device_number(device)
    if number >= 0:
        raise ArgumentError(f"device={device}: pinned memory is of the host: HOST or host(1); torch allocates on GPUs", argument="device")
    return number


def _device(device: Any) -> Any:
    try:
        # mpgpu's number of the host is none of torch's.
        where = torch.device("cpu" if device is not True and device == HOST else device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device={device!r}: {str(error).splitlines()[0]}", argument="device") from error
    if where.type != "cuda":
        return where
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if where.index is None and count else where.index or 0
    if index >= count:
        raise ArgumentError(f"device={device!r}: torch sees {count} GPUs", argument="device")
    return torch.device("cuda", index)


def _allocating_for(stream: Any, where: Any) -> AbstractContextManager[Any]:
    """Has torch take memory that work of ``stream`` may write at once: what was freed in another stream may still be in use there."""
    if stream is None or where.type != "cuda":
        return contextlib.nullcontext()
    number, _ = given(stream)
    if number <= LAST_DEFAULT:
        user = torch.cuda.default_stream(where)
    else:
        user = torch.cuda.ExternalStream(number, device=where)
    context: AbstractContextManager[Any] = torch.cuda.stream(user)
    return context


def _plain(tensor: Any) -> Any:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _carve(wanted: list[tuple[tuple[int, ...], Any]], device: int, context: Context | None) -> list[Any]:
    """Tensors one behind the other in one allocation, which each of them holds."""
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


def _twin(tree: Any, make: Callable[[list[Any]], list[Any]]) -> Any:
    """The tree with other tensors in place of its own: ``make`` gets each once, however often it is in the tree."""
    places: dict[object, int] = {}
    distinct: list[Any] = []
    for tensor in _tensors(tree):
        if places.setdefault(_identity(tensor), len(distinct)) == len(distinct):
            distinct.append(tensor)
    made = make(distinct)

    def rebuild(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return made[places[_identity(node)]]
        if isinstance(node, Mapping):
            # With what torch hangs on a state dict: `_metadata`.
            twin = shallow_copy(node) if isinstance(node, dict) else {}
            for key, value in node.items():
                twin[key] = rebuild(value)
            return twin
        if isinstance(node, (list, tuple)):
            parts = [rebuild(value) for value in node]
            return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
        return node

    return rebuild(tree)


def _identity(tensor: Any) -> object:
    if not tensor.numel():
        return id(tensor)
    place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    # Whether it is read as the conjugate or the negative of that memory.
    return (*place, tensor.is_conj(), tensor.is_neg())


def _tensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _pairs(dst: Any, src: Any, where: str) -> Iterator[tuple[Any, Any]]:
    at = where or "the tree"
    if isinstance(dst, torch.Tensor) and isinstance(src, torch.Tensor):
        if dst.dtype != src.dtype or dst.shape != src.shape:
            raise ArgumentError(
                f"{at}: dst is {tuple(dst.shape)} of {dst.dtype} and src {tuple(src.shape)} of {src.dtype}: they must be the same"
            )
        yield dst, src
    elif isinstance(dst, Mapping) and isinstance(src, Mapping):
        if dst.keys() != src.keys():
            odd = sorted(map(repr, dst.keys() ^ src.keys()))
            raise ArgumentError(f"{at}: only one of dst and src has {', '.join(odd)}")
        for key in dst:
            yield from _pairs(dst[key], src[key], f"{where}[{key!r}]")
    elif isinstance(dst, (list, tuple)) and isinstance(src, (list, tuple)):
        if len(dst) != len(src):
            raise ArgumentError(f"{at}: dst has {len(dst)} entries and src {len(src)}")
        for index, (one, other) in enumerate(zip(dst, src)):
            yield from _pairs(one, other, f"{where}[{index}]")
    elif isinstance(dst, (torch.Tensor, Mapping, list, tuple)) or isinstance(src, (torch.Tensor, Mapping, list, tuple)):
        raise ArgumentError(f"{at}: dst is a {type(dst).__name__} and src a {type(src).__name__}")
