# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loading of tensors from safetensors files onto devices."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Union, overload

import torch

from ._contents import _Contents, reading_ahead
from ._context import Context, default_context
from ._fill import Filler, Wanted, allocated, batches, is_read_by_cpu
from ._garbage import without_collection
from ._memory import why_no_memory
from ._progress import Progress
from ._safetensors import TORCH_TYPES, Entry
from ._shards import Path, Shard, open_shards
from ._torch_devices import TorchDevice, torch_device
from .errors import ArgumentError

# Maximum number of bytes of a batch that is converted, or that an iterator yields.
_SHORT_BATCH = 1 << 30

Paths = Union[Path, Sequence[Path]]
"""Path of a file, of an index or of a folder, or a list of paths of files."""

_Placed = Mapping[str, tuple[Any, ...]]
"""Devices of each requested tensor, by name."""


@overload
def load(
    path: Paths,
    device: list[Any] | tuple[Any, ...],
    *,
    select: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    cache: bool = True,
    progress: bool = False,
    context: Context | None = None,
) -> list[dict[str, torch.Tensor]]: ...


@overload
def load(
    path: Paths,
    device: TorchDevice | Mapping[str, TorchDevice] | None = None,
    *,
    select: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    into: Mapping[str, torch.Tensor] | None = None,
    cache: bool = True,
    progress: bool = False,
    context: Context | None = None,
) -> dict[str, torch.Tensor]: ...


def load(
    path: Any,
    device: Any = None,
    *,
    select: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    into: Mapping[str, torch.Tensor] | None = None,
    cache: bool = True,
    progress: bool = False,
    context: Context | None = None,
) -> Any:
    """Loads tensors of safetensors files onto ``device`` and returns them by name. The data are copied directly from the
    files, over all suitable links, and each byte is read once.

    All headers are read and all arguments are checked before memory is allocated and before the first byte is copied. Autograd does not
    record the copies.

    Args:
        path: path of a file; a list of paths of files; or path of a model in several files: its index ``*.safetensors.index.json``, or the
            folder that contains the index. A folder without an index is loaded as the list of its ``*.safetensors`` files. The files must
            not be modified until the call returns. If a file is truncated or modified during the call, the call raises an exception and
            returns nothing.
        device: one device for all tensors; or a dict from names of tensors to devices; or a list of devices. Tensors that the dict does not
            contain are not read. With a list, each device gets all tensors, and a list of dicts is returned. The GPUs then forward the data
            to each other, so that each byte is read once.
        select: names of the tensors to load, or patterns of :mod:`fnmatch` such as ``"layers.0.*"``: one, or a list. Other tensors are not
            read. The default is all tensors.
        dtype: a floating-point type to which floating-point tensors are converted on the device, batch by batch. Other tensors keep their
            types.
        into: a dict of existing tensors to fill, by name, on any supported device. They must be contiguous and have the stored shape and
            type. Tensors of the file whose names it does not contain are not read. ``device`` and ``dtype`` must be ``None``. The call
            returns a dict of these tensors. If it raises an exception while data are copied, the contents of the tensors are undefined.
        cache: False to leave the page cache of the system unchanged, for example if the files are loaded only once. A hint.
        progress: True to show the progress on stderr, with tqdm if it is installed.
        context: the context that executes the copies. The default is :func:`mpgpu.default_context`.

    Raises:
        ArgumentError: a file has another format, is truncated or missing, or is modified during the call (the message contains the
            reason); a tensor is in two files; torch lacks an element type; a name, a pattern or a device does not exist; or a tensor of
            ``into`` has another shape or type, is not contiguous or overlaps another one.
        OSError: a file cannot be opened or read. The message contains the reason that the system reports.
        OutOfMemory, MemoryError: a device or the host has no more memory.

    Warns:
        RuntimeWarning: the system cannot map a file. Its data are then first read into host memory, which is slower.
    """
    if into is not None and dtype is not None:
        raise ArgumentError(
            f"dtype={dtype} and into: pass only one of them, because the tensors of into already have types", argument="dtype"
        )
    targets: dict[str, Sequence[Any]]
    with contextlib.ExitStack() as opened:
        with without_collection():
            shards = open_shards(path, opened)
            placed = _placed(shards, device, select, into)
            wanted = _wanted(shards, placed, dtype)
            if into is not None:
                _check_targets(into, wanted)
                targets = {name: (into[name],) for name in placed}
            else:
                targets = _allocated(placed, wanted)
        filler = Filler(context)
        bar = opened.enter_context(Progress(_shown(path), sum(each.nbytes for some in wanted for each in some))) if progress else None
        most = _SHORT_BATCH if dtype is not None or progress else None
        for contents, batch in opened.enter_context(contextlib.closing(_batches(shards, wanted, most, cache, context))):
            filler.fill(contents, batch, targets)
            if bar is not None:
                bar.add(sum(each.nbytes for each in batch))
        filler.finish()
    if isinstance(device, (list, tuple)):
        return [{name: targets[name][at] for name in placed} for at in range(len(device))]
    return {name: targets[name][0] for name in placed}


def iter_load(
    path: Paths,
    device: TorchDevice | Mapping[str, TorchDevice],
    *,
    select: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    cache: bool = True,
    context: Context | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Loads tensors like :func:`load` and yields the pairs of name and tensor, batch by batch, in the order of the files. Besides the
    tensors that the program keeps, the iterator holds at most one batch of 1 GiB, or one larger tensor.

    The call checks all headers and arguments. The data are read while the program iterates. If a file is modified during the iteration, the
    iterator raises an exception after the last tensor of this file. The tensors of the file that it has yielded before may then be wrong.
    The files are closed when the iterator ends, or is closed or released.

    Arguments and errors are those of :func:`load`.
    """
    if isinstance(device, (list, tuple)):
        raise ArgumentError(
            f"device={device!r}: pass one device, or a dict from names to devices; only mpgpu.torch.load accepts a list", argument="device"
        )
    yielded = _each(path, device, select, dtype, cache, context)
    # The first step of the generator checks the arguments and yields None.
    next(yielded)
    return yielded


def _each(path: Any, device: Any, select: Any, dtype: Any, cache: bool, context: Context | None) -> Generator[Any, None, None]:
    """Yields ``None`` after all checks, and then pairs of name and tensor."""
    with contextlib.ExitStack() as opened:
        with without_collection():
            shards = open_shards(path, opened)
            wanted = _wanted(shards, _placed(shards, device, select, None), dtype)
        yield None
        # Batches do not contain tensors without elements.
        for each in (each for some in wanted for each in some if not each.nbytes):
            yield each.name, allocated(each.shape, each.dtype, each.devices[0])
        filler = Filler(context)
        for contents, batch in opened.enter_context(contextlib.closing(_batches(shards, wanted, _SHORT_BATCH, cache, context))):
            made: dict[str, Any] = {each.name: (allocated(each.shape, each.dtype, each.devices[0]),) for each in batch}
            filler.fill(contents, batch, made)
            filler.finish()
            # The generator keeps no reference to a tensor that it has yielded, so that the program can free the tensor.
            for each in batch:
                yield each.name, made.pop(each.name)[0]


def _shown(path: Any) -> str:
    """Returns the name of the loaded files for progress messages."""
    return f"{len(path)} files" if isinstance(path, (list, tuple)) else os.fsdecode(path)


def _placed(shards: Sequence[Shard], device: Any, select: Any, into: Any) -> _Placed:
    """Returns the devices of each requested tensor, by name."""
    placed: _Placed
    if into is not None:
        if device is not None:
            raise ArgumentError(
                f"device={device!r} and into: pass only one of them, because the tensors of into are already on devices", argument="device"
            )
        if not isinstance(into, Mapping):
            raise ArgumentError(
                f"into is a {type(into).__name__}: pass a dict of tensors by name, for example x.state_dict()", argument="into"
            )
        placed = {name: (getattr(tensor, "device", None),) for name, tensor in into.items()}
        argument = "into"
    elif isinstance(device, Mapping):
        devices = {where: torch_device(where) for where in set(device.values())}
        placed = {name: (devices[where],) for name, where in device.items()}
        argument = "device"
    elif device is None:
        raise ArgumentError("device=None: pass a device, for example 'cuda:0', or existing tensors by into=…", argument="device")
    else:
        everywhere = tuple(map(torch_device, device)) if isinstance(device, (list, tuple)) else (torch_device(device),)
        placed = {name: everywhere for shard in shards for name in shard.entries}
        argument = ""
    if select is not None:
        placed = _selected(placed, select)
    _check_names(shards, placed, argument)
    return placed


def _check_names(shards: Sequence[Shard], placed: _Placed, argument: str) -> None:
    """Raises an exception if ``placed`` contains a name that is in no file. ``argument`` is the argument with the names."""
    if not argument:
        return
    names = [name for shard in shards for name in shard.entries]
    known = set(names)
    for name in placed:
        if name not in known:
            files, contain, have = shards[0].path, "the file does not contain", "it has"
            if len(shards) > 1:
                files, contain, have = f"{shards[0].path} and {len(shards) - 1} other files", "the files do not contain", "they have"
            raise ArgumentError(
                f"{files}: `{argument}` names tensor {name!r}, which {contain} ({have} {len(names)} tensors{_example(names)})",
                argument=argument,
            )


def _example(names: Sequence[str]) -> str:
    """Returns one of the names for a message, or nothing if there is none."""
    return f", for example {names[0]!r}" if names else ""


def _selected(placed: _Placed, select: Any) -> _Placed:
    """Returns the devices of the tensors whose names match a pattern, in the order of ``placed``."""
    patterns = [select] if isinstance(select, str) else list(select)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(f"select={select!r}: must be a name or a pattern of fnmatch, or a list of them", argument="select")
    exact = {pattern for pattern in patterns if pattern in placed}
    found = set(exact)
    for pattern in set(patterns) - exact:
        matched = list(filter(re.compile(fnmatch.translate(pattern)).match, placed))
        if not matched:
            raise ArgumentError(f"select={pattern!r}: matches none of {len(placed)} tensors{_example(list(placed))}", argument="select")
        found.update(matched)
    return {name: devices for name, devices in placed.items() if name in found}


def _wanted(shards: Sequence[Shard], placed: _Placed, dtype: Any) -> list[list[Wanted]]:
    """Returns the requested tensors of each file, in the order of their data."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"dtype={dtype!r}: must be a floating-point type of torch, for example torch.bfloat16", argument="dtype")
    stored = {name: getattr(torch, known, None) for name, known in TORCH_TYPES.items()}
    wanted: list[list[Wanted]] = []
    conversions: dict[tuple[Any, ...], Wanted] = {}
    for shard in shards:
        wanted.append([])
        for name, entry in shard.entries.items():
            devices = placed.get(name)
            if devices is None:
                continue
            own = stored.get(entry.dtype)
            if own is None:
                raise _unknown(shard.path, name, entry)
            made = dtype if dtype is not None and own.is_floating_point else own
            each = Wanted(name, entry, _shape_of(entry, shard.path, name), own, made, devices)
            wanted[-1].append(each)
            if made is not own:
                conversions.setdefault((own, devices), each)
    for each in conversions.values():
        _check_conversion(each)
    return wanted


def _unknown(path: str, name: str, entry: Entry) -> ArgumentError:
    return ArgumentError(
        f"{path}: tensor {name!r}: its type {entry.dtype} is not known to this torch ({torch.__version__}) or to mpgpu: update them, "
        "or load only the other tensors by select=[…]"
    )


def _shape_of(entry: Entry, path: str, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor in torch, which counts a pair of elements of four bits as one element."""
    if entry.dtype != "F4":
        return entry.shape
    if not entry.shape or entry.shape[-1] % 2:
        raise ArgumentError(
            f"{path}: tensor {name!r}: its shape {entry.shape} must end with an even number, because torch stores pairs of F4 elements"
        )
    return (*entry.shape[:-1], entry.shape[-1] // 2)


def _check_conversion(each: Wanted) -> None:
    """Raises an exception if torch cannot convert a tensor to the requested type on its devices."""
    for device in each.devices:
        try:
            allocated((1,), each.dtype, device).copy_(allocated((8,), torch.uint8, device).zero_().view(each.stored)[:1])
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"tensor {each.name!r}: torch cannot convert {each.stored} to {each.dtype} on {device} "
                f"({str(error).splitlines()[0]}): load it without dtype",
                argument="dtype",
            ) from error


def _allocated(placed: _Placed, wanted: Sequence[Sequence[Wanted]]) -> dict[str, Sequence[Any]]:
    """Allocates the tensors."""
    by_name = {each.name: each for some in wanted for each in some}
    return {name: [allocated(by_name[name].shape, by_name[name].dtype, device) for device in devices] for name, devices in placed.items()}


def _check_targets(into: Mapping[str, Any], wanted: Sequence[Sequence[Wanted]]) -> None:
    """Raises an exception if a tensor of ``into`` cannot be filled with the tensor of the same name."""
    ranges: list[tuple[str, int, int, str]] = []
    for each in (each for some in wanted for each in some):
        tensor = into[each.name]
        where = f"into[{each.name!r}]"
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{where} is a {type(tensor).__name__}: it must be a tensor", argument="into")
        reason = why_no_memory(torch, tensor)
        if reason is None and (not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()):
            reason = f"shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous: pass a contiguous tensor"
        if reason is None and (tensor.dtype is not each.dtype or tuple(tensor.shape) != each.shape):
            reason = (
                f"it is {tensor.dtype} of shape {tuple(tensor.shape)}, but the file has {each.dtype} of shape {each.shape}: "
                "pass a tensor of the same type and shape"
            )
        if reason is not None:
            raise ArgumentError(f"{where}: {reason}", argument="into")
        if each.nbytes:
            ranges.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, each.name))
    ranges.sort()
    for one, other in zip(ranges, ranges[1:]):
        if one[0] == other[0] and other[1] < one[2]:
            raise ArgumentError(f"into[{one[3]!r}] and into[{other[3]!r}] overlap: pass only one of them", argument="into")


def _batches(
    shards: Sequence[Shard], wanted: Sequence[Sequence[Wanted]], most: int | None, cache: bool, context: Context | None
) -> Generator[tuple[_Contents, list[Wanted]], None, None]:
    """Yields pairs of a batch of tensors and the contents of its file. Raises an exception if the file was modified meanwhile."""
    filled = [(shard, [each for each in some if each.nbytes]) for shard, some in zip(shards, wanted)]
    filled = [(shard, some) for shard, some in filled if some]
    warned = False
    # Reading ahead adds data to the page cache, and is therefore omitted if the page cache must stay unchanged.
    ahead = [each for shard, some in filled for each in _ranges(shard, some)] if cache else []
    with reading_ahead(ahead):
        for shard, some in filled:
            copying = None if all(map(is_read_by_cpu, some)) else context or default_context()
            contents = _Contents(shard.file, shard.path, cache=cache, context=copying)
            if contents.refusal and not warned:
                warned = True
                warnings.warn(
                    f"{shard.path}: the system cannot map the file ({contents.refusal}): its data are first read into host memory, "
                    "which is slower",
                    RuntimeWarning,
                    stacklevel=3,
                )
            try:
                for batch in batches(some, min(most or contents.batch, contents.batch)):
                    yield contents, batch
            finally:
                contents.close()
            shard.check_unchanged()


def _ranges(shard: Shard, wanted: Sequence[Wanted]) -> Iterator[tuple[int, int, int]]:
    """Yields the ranges of a file that contain the requested tensors, each as file descriptor, first byte and end."""
    begin = end = wanted[0].entry.begin
    for each in wanted:
        if each.entry.begin != end:
            yield shard.file.fileno(), begin, end
            begin = each.entry.begin
        end = each.entry.end
    yield shard.file.fileno(), begin, end
