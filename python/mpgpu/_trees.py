# SPDX-License-Identifier: MIT OR Apache-2.0
"""Functions that iterate over trees of tensors and copy trees. A tree is a tensor, or a dict, list or tuple of trees. Leaves that are not
tensors, such as numbers and strings, are passed through to the copy.
"""

from __future__ import annotations

import array
import dataclasses
import mmap
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from copy import copy as shallow_copy
from typing import Any, Callable

import torch

from ._memory import why_no_memory
from .errors import ArgumentError

_BRANCHES = (Mapping, list, tuple)
_VALUES = (bool, int, float, complex, str, bytes, bytearray, range, type, types.ModuleType)
_WITH_MEMORY = {
    "__array_interface__": "pass torch.as_tensor(x)",
    "__cuda_array_interface__": "pass torch.as_tensor(x, device='cuda')",
    "__dlpack__": "pass torch.from_dlpack(x)",
}


def tensors_of(tree: Any, name: str = "tree", *, allows_meta: bool = False) -> Iterator[Any]:
    """Yields each tensor of a tree, in order.

    Args:
        name: name of the tree in error messages.
        allows_meta: True if the caller needs only shapes and types of the tensors, not their contents.

    Raises:
        ArgumentError: a tensor has no memory of its own, or an object may contain tensors but is not a tree.
    """
    if isinstance(tree, torch.Tensor):
        reason = None if allows_meta and tree.is_meta else why_no_memory(torch, tree)
        if reason is not None:
            raise ArgumentError(f"{name}: {reason}")
        yield tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _below(value, f"{name}[{key!r}]", allows_meta)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _below(value, f"{name}[{index}]", allows_meta)
    else:
        raise _no_tree(tree, name)


def _below(value: Any, name: str, allows_meta: bool) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) or isinstance(value, _BRANCHES):
        yield from tensors_of(value, name, allows_meta=allows_meta)
    else:
        _check_value(value, name)


def _no_tree(value: Any, name: str) -> ArgumentError:
    remedy = _remedy(value) or "pass a tensor, or a dict, list or tuple of tensors"
    return ArgumentError(f"{name} is a {type(value).__name__}, which is not a tree of tensors: {remedy}")


def _check_value(value: Any, name: str) -> None:
    """Raises if an object may contain tensors but is neither a tensor nor a dict, list or tuple."""
    if _remedy(value) is not None:
        raise _no_tree(value, name)


def _remedy(value: Any) -> str | None:
    """Returns the remedy for an object that may contain tensors. Returns ``None`` for a value that contains none."""
    numpy: Any = sys.modules.get("numpy")
    if value is None or isinstance(value, _VALUES) or (numpy is not None and isinstance(value, numpy.generic)):
        return None
    if callable(getattr(value, "state_dict", None)):
        return "pass x.state_dict()"
    for protocol, remedy in _WITH_MEMORY.items():
        if hasattr(value, protocol):
            return remedy
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        return "pass a tensor that has it"
    if isinstance(value, (memoryview, array.array, mmap.mmap)):
        return "pass torch.frombuffer(x, dtype=…)"
    if isinstance(value, (Set, ValuesView, deque)):
        return "pass list(x)" if any(map(_holds_tensors, value)) else None
    # Other iterables are not iterated, because that could exhaust them. A file contains no tensors.
    if isinstance(value, Iterable) and not hasattr(value, "read"):
        return "pass list(x)"
    return "pass a dict of the tensors that it holds, as vars(x)" if _holds_tensors(_attributes(value)) else None


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return getattr(value, "__dict__", {})


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (torch.Tensor, torch.nn.Module))


def identity_of(tensor: Any) -> object:
    """Returns a key that is equal for two tensors if they have the same elements in the same memory."""
    if not tensor.numel():
        return id(tensor)
    # Tensors on the meta device have no address.
    address = tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())
    place = (tensor.device, address, tuple(tensor.shape), tensor.stride(), tensor.dtype)
    # One tensor may be the conjugate or the negative of the other in the same memory.
    return (*place, tensor.is_conj(), tensor.is_neg())


def plain(tensor: Any) -> Any:
    """Returns a contiguous tensor with the same elements. It shares the memory of a tensor that is already contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def twin_of(tree: Any, make: Callable[[list[Any]], list[Any]], *, allows_meta: bool = False) -> Any:
    """Returns a copy of the tree in which each tensor is replaced by the result of ``make``. ``make`` is called once for each tensor, even
    if the tensor occurs several times in the tree.
    """
    places: dict[object, int] = {}
    distinct: list[Any] = []
    for tensor in tensors_of(tree, allows_meta=allows_meta):
        if places.setdefault(identity_of(tensor), len(distinct)) == len(distinct):
            distinct.append(tensor)
    made = make(distinct)

    def rebuild(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return made[places[identity_of(node)]]
        if isinstance(node, Mapping):
            # This keeps the attribute `_metadata`, which torch adds to a state dict.
            twin = shallow_copy(node) if isinstance(node, dict) else {}
            for key, value in node.items():
                twin[key] = rebuild(value)
            return twin
        if isinstance(node, (list, tuple)):
            parts = [rebuild(value) for value in node]
            return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
        return node

    return rebuild(tree)


def pairs_of(dst: Any, src: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the pairs of corresponding tensors of two trees with the same structure.

    Raises:
        ArgumentError: the trees differ in structure, or tensors differ in type or shape. Also the errors of :func:`tensors_of`.
    """
    for tree, name in ((dst, "dst"), (src, "src")):
        # The whole tree is checked before any tensor is copied.
        for _ in tensors_of(tree, name):
            pass
    yield from _pairs_below(dst, src, "")


def _pairs_below(dst: Any, src: Any, where: str) -> Iterator[tuple[Any, Any]]:
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
            yield from _pairs_below(dst[key], src[key], f"{where}[{key!r}]")
    elif isinstance(dst, (list, tuple)) and isinstance(src, (list, tuple)):
        if len(dst) != len(src):
            raise ArgumentError(f"{at}: dst has {len(dst)} entries and src {len(src)}")
        for index, (one, other) in enumerate(zip(dst, src)):
            yield from _pairs_below(one, other, f"{where}[{index}]")
    elif isinstance(dst, (torch.Tensor, *_BRANCHES)) or isinstance(src, (torch.Tensor, *_BRANCHES)):
        raise ArgumentError(f"{at}: dst is a {type(dst).__name__} and src a {type(src).__name__}")
