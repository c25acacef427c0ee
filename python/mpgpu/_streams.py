# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams that mpgpu creates."""

from __future__ import annotations

from typing import Any

from ._context import Context, default_context
from ._dropped import collect, held
from ._library import NULL, Owner, check, ffi, lib
from ._names import device_number
from .typing import Device

_cast = ffi.cast


class Stream(Owner):
    """Stream of a context: its work runs in order. It is not ordered with other streams.

    On CUDA ``int(stream)`` is a ``cudaStream_t``, and ``__cuda_stream__`` passes the stream to other libraries. The stream is destroyed
    with its last reference; work that is already enqueued still runs. May be used from any thread.

    Args:
        device: a GPU, for example ``0`` or ``"cuda:0"``, or host memory: ``HOST``, ``"cpu"``.
        context: the context of the stream. The default is :func:`default_context`.

    Raises:
        ArgumentError: the device does not exist.
    """

    __slots__ = ("__weakref__", "_context", "_handle", "device")

    def __init__(self, device: Device = 0, *, context: Context | None = None) -> None:
        self._handle = NULL
        self._context = context if context is not None else default_context()
        self.device: int = device_number(device)
        made = ffi.new("mp_stream_t *")
        check(lib.mp_stream_create(self._context._handle, self.device, made))
        self._handle = made[0]

    def __del__(self, destroy: Any = lib.mp_stream_destroy) -> None:
        # If the constructor rejected its arguments, there is no handle.
        if getattr(self, "_handle", NULL) != NULL:
            destroy(self._context._handle, self._handle)

    def synchronize(self) -> None:
        """Blocks until all work that is enqueued in the stream so far has finished. Raises the error of that work."""
        check(lib.mp_stream_synchronize(self._context._handle, self._handle))
        collect(len(held))

    def __int__(self) -> int:
        return int(_cast("uintptr_t", self._handle))

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, int(self))

    def __repr__(self) -> str:
        return f"<mpgpu.Stream of device {self.device}: {int(self):#x}>"
