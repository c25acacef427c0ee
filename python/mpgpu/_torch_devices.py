# SPDX-License-Identifier: MIT OR Apache-2.0
"""Converts torch devices to device numbers of mpgpu, and device numbers to torch devices."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Union

import torch

from ._current import LAST_DEFAULT, given
from ._library import HOST, whole
from ._names import device_number
from .errors import ArgumentError
from .typing import Device

TorchDevice = Union[Device, torch.device]


def torch_device(device: Any) -> Any:
    """Returns the ``torch.device`` and the device number for a device that is the CPU or a CUDA device that torch sees.

    Raises:
        ArgumentError: the device is of another kind.
    """
    number = whole(device)
    if number is not None and number < 0:
        # torch does not accept mpgpu's device numbers for host memory.
        if number != HOST:
            raise ArgumentError(f"device={device!r}: torch has one device for the host: pass mpgpu.HOST or 'cpu'", argument="device")
        return torch.device("cpu")
    try:
        if isinstance(device, bool):
            raise TypeError("a bool is not a device")
        where = torch.device(device if number is None else number)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"device={device!r}: {str(error).splitlines()[0]}", argument="device") from error
    if where.type == "cpu":
        return torch.device("cpu")
    if where.type != "cuda":
        raise ArgumentError(
            f"device={device!r}: mpgpu supports the CPU and CUDA devices: move tensors there from 'cpu' by x.to({str(where)!r})",
            argument="device",
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if where.index is None and count else where.index or 0
    if index >= count:
        raise ArgumentError(f"device={device!r}: torch sees {count} GPUs", argument="device")
    return torch.device("cuda", index)


def gpu_of(tensor: Any) -> int | None:
    """Returns the number of the GPU whose memory contains a tensor. Returns ``None`` for a tensor on the CPU."""
    return tensor.get_device() if tensor.is_cuda else None


def host_number(device: Device) -> int:
    """Returns the device number of a host NUMA domain.

    Raises:
        ArgumentError: the device is a GPU.
    """
    number = device_number(device)
    if number >= 0:
        raise ArgumentError(f"device={device}: pinned memory is host memory: HOST or host(1); torch allocates on GPUs", argument="device")
    return number


def allocating_for(stream: Any, where: Any) -> AbstractContextManager[Any]:
    """Returns a context manager. Memory that torch allocates inside it may be written immediately by work in ``stream``. Without this
    context manager, torch could return memory that was freed in another stream and is still in use there.
    """
    if stream is None or where.type != "cuda":
        return contextlib.nullcontext()
    number, _ = given(stream)
    if number <= LAST_DEFAULT:
        user = torch.cuda.default_stream(where)
    else:
        user = torch.cuda.ExternalStream(number, device=where)
    context: AbstractContextManager[Any] = torch.cuda.stream(user)
    return context
