# SPDX-License-Identifier: MIT OR Apache-2.0
"""Types of the package's parameters: memory, streams, devices and element types of any framework. They are defined by the protocols that
the objects support.
"""

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
    "BlockArrays",
    "BlockIndices",
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
    """Array or tensor that supports DLPack, for example from torch, JAX, CuPy or NumPy."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsArrayInterface(Protocol):
    """Array in host memory that supports NumPy's ``__array_interface__``."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """Array in GPU memory that supports Numba's ``__cuda_array_interface__``."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Array = Union[SupportsBuffer, SupportsDlpack, SupportsArrayInterface, SupportsCudaArrayInterface]
"""Any object with memory."""

BlockArrays = Union[Array, Sequence[Array]]
"""Array whose first dimension counts blocks, or a list or tuple of such arrays, one for each layer."""

BlockIndices = Union[Array, Sequence[SupportsIndex]]
"""Indices of blocks: a list, or a one-dimensional array of integers of 32 or 64 bits."""


class SupportsCudaStream(Protocol):
    """Stream that supports ``__cuda_stream__``, the protocol of cuda.core: an mpgpu or Numba stream, or a ``torch.cuda.Stream`` of a recent
    version.
    """

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """A ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """A ``cupy.cuda.Stream``."""

    @property
    def ptr(self) -> int: ...


StreamLike = Union[SupportsIndex, SupportsCudaStream, TorchStream, CupyStream]
"""A framework's stream, an mpgpu stream, or the handle of a stream."""


class TorchDevice(Protocol):
    """A ``torch.device``."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> Any: ...


class CupyDevice(Protocol):
    """A ``cupy.cuda.Device``."""

    @property
    def id(self) -> int: ...


Device = Union[SupportsIndex, str, TorchDevice, CupyDevice]
"""Device: its number (GPUs from 0 up, ``mpgpu.HOST``, ``mpgpu.host(1)``), ``"cuda:0"``, ``"cuda"``, ``"cpu"``, or a framework's object."""


class ElementTypeObject(Protocol):
    """Element type object from NumPy, torch or ml_dtypes."""

    @property
    def itemsize(self) -> int: ...


ElementType = Union[str, type, ElementTypeObject]
"""Element type: ``"f4"``, ``"<f4"``, ``"float32"``, ``"bfloat16"``, ``float``, ``numpy.float32``, ``torch.float32``, …"""


class Communicator(Protocol):
    """Communicator from which a :class:`mpgpu.Node` is created, for example an mpi4py communicator."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...

    def allgather(self, sendobj: Any, /) -> Sequence[Any]: ...
