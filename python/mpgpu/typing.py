# SPDX-License-Identifier: MIT OR Apache-2.0
"""Types of the package's parameters: memory, streams, devices and element types of any framework, defined by their protocols."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, Union

if TYPE_CHECKING:
    from typing_extensions import Buffer as SupportsBuffer
elif sys.version_info >= (3, 12):
    from collections.abc import Buffer as SupportsBuffer
else:
    SupportsBuffer = Union[bytes, bytearray, memoryview]

__all__ = [
    "Array",
    "Communicator",
    "CupyDevice",
    "CupyStream",
    "Device",
    "ElementType",
    "ElementTypeObject",
    "StreamLike",
    "SupportsArrayInterface",
    "SupportsBuffer",
    "SupportsCudaArrayInterface",
    "SupportsCudaStream",
    "SupportsDlpack",
    "TorchDevice",
    "TorchStream",
]


class SupportsDlpack(Protocol):
    """Memory with DLPack: torch, JAX, CuPy, NumPy."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsArrayInterface(Protocol):
    """Host memory with NumPy's protocol."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """GPU memory with Numba's protocol."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Array = Union[SupportsBuffer, SupportsDlpack, SupportsArrayInterface, SupportsCudaArrayInterface]
"""Any object with memory."""


class SupportsCudaStream(Protocol):
    """Stream with the protocol of cuda.core: streams of mpgpu, Numba and recent versions of torch."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """Stream of torch."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """Stream of CuPy."""

    @property
    def ptr(self) -> int: ...


StreamLike = Union[SupportsIndex, SupportsCudaStream, TorchStream, CupyStream]
"""Stream of a framework or of mpgpu, or its handle."""


class TorchDevice(Protocol):
    """Device of torch."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> Any: ...


class CupyDevice(Protocol):
    """GPU of CuPy."""

    @property
    def id(self) -> int: ...


Device = Union[SupportsIndex, str, TorchDevice, CupyDevice]
"""Device: its number (GPUs from 0 up, ``mpgpu.HOST``, ``mpgpu.host(1)``), ``"cuda:0"``, ``"cuda"``, ``"cpu"``, or a framework's object."""


class ElementTypeObject(Protocol):
    """Element type object of NumPy, torch or ml_dtypes."""

    @property
    def itemsize(self) -> int: ...


ElementType = Union[str, type, ElementTypeObject]
"""Element type: ``"f4"``, ``"<f4"``, ``"float32"``, ``"bfloat16"``, ``float``, ``numpy.float32``, ``torch.float32``, …"""


class Communicator(Protocol):
    """Communicator for :class:`mpgpu.Node`, for example one of mpi4py."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...

    def allgather(self, sendobj: Any, /) -> Sequence[Any]: ...
