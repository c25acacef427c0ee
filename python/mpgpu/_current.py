# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams that callers pass, and the current streams of frameworks such as torch and CuPy."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any, Callable

from ._library import whole
from .errors import ArgumentError
from .typing import StreamLike

# Highest handle of a default stream. 0 and 1 are the legacy default stream, and 2 is the per-thread default stream. Each belongs to the GPU
# that is current in the calling thread.
LAST_DEFAULT = 2
LAST_HANDLE = 2**64 - 1


class Current:
    """Current stream of a framework on one device. The stream is looked up at each use."""

    __slots__ = ("_device_now", "_handle_now", "_on", "device", "is_known", "key")

    def __init__(
        self,
        key: object,
        device: int | None,
        handle_now: Callable[[], int],
        device_now: Callable[[], int] | None,
        on: Callable[[int], AbstractContextManager[Any]] | None,
    ) -> None:
        self.key = key
        self.device = device
        # True if the framework orders its later work after the work in this stream, so that no wait is needed.
        self.is_known = on is not None
        self._handle_now = handle_now
        self._device_now = device_now
        self._on = on

    @staticmethod
    def torch(torch: Any, device: int) -> Current:
        known = _of_torch.get(device)
        if known is not None and known[0] is torch:
            return known[1]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)

        def handle() -> int:
            # The function `_cuda_getCurrentRawStream` is undocumented, but ten times faster.
            return int(raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream)

        current = Current(("torch", device), device, handle, torch.cuda.current_device, torch.cuda.device)
        _of_torch[device] = (torch, current)
        return current

    @staticmethod
    def cupy(device: int) -> Current:
        cuda = sys.modules["cupy"].cuda

        def handle() -> int:
            if cuda.runtime.getDevice() == device:
                return int(cuda.get_current_stream().ptr)
            with cuda.Device(device):
                return int(cuda.get_current_stream().ptr)

        return Current(("cupy", device), device, handle, cuda.runtime.getDevice, cuda.Device)

    @staticmethod
    def fixed(handle: int, device: int | None = None) -> Current:
        """Returns an object that always refers to the stream ``handle``, for example the stream that an array's producer has specified."""
        return Current((handle, device), device, lambda: handle, None, None)

    def handle(self) -> int:
        return self._handle_now()

    def here(self, handle: int) -> AbstractContextManager[Any] | None:
        """Returns the context manager that must be entered before ``handle`` is used. It makes the device current, because the handle of a
        default stream refers to the current GPU.
        """
        if handle > LAST_DEFAULT or self.device is None:
            return None
        if self._device_now is not None and self._on is not None:
            return None if self._device_now() == self.device else self._on(self.device)
        return make_current(self.device)


# Cache: torch module and `Current` object of each GPU. It is used for each tensor.
_of_torch: dict[int, tuple[Any, Current]] = {}


def make_current(device: int) -> AbstractContextManager[Any]:
    """Makes a GPU current for the calling thread. Uses a framework that the program has already imported."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        on: AbstractContextManager[Any] = torch.cuda.device(device)
        return on
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        on = cupy.cuda.Device(device)
        return on
    return contextlib.nullcontext()


def _checked(handle: int) -> int:
    if handle < 0:
        raise TypeError(f"stream={handle}: a handle is not negative; None is the current stream, 0 the default stream")
    if handle > LAST_HANDLE:
        raise ArgumentError(f"stream={handle}: a handle is an address, of 64 bits at most", argument="stream")
    return handle


def given(stream: StreamLike) -> tuple[int, int | None]:
    """Returns the handle of a stream that the caller passes. Also returns its device if the handle does not identify the device, as for a
    default stream.
    """
    if type(stream) is int:
        return _checked(stream), None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # The protocol returns version and handle. In Numba and cuda.core it is a method; in some early versions it was a property.
        answer = protocol() if callable(protocol) else protocol
        handle = int(answer[1])
    elif hasattr(stream, "cuda_stream"):  # torch
        handle = int(stream.cuda_stream)
    elif hasattr(stream, "ptr"):  # CuPy
        handle = int(stream.ptr)
    else:
        number = whole(stream)
        if number is None:
            raise TypeError(
                f"stream is a {type(stream).__name__}: it must be a stream of torch, CuPy or mpgpu, have __cuda_stream__, or be a handle"
            )
        return _checked(number), None
    if handle > LAST_DEFAULT:
        return handle, None
    device = getattr(stream, "device_index", None)
    if device is None:
        device = getattr(stream, "device_id", None)
    return handle, int(device) if device is not None and device >= 0 else None
