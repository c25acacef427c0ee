# SPDX-License-Identifier: MIT OR Apache-2.0
"""What signatures of the package take: memory, streams, devices and element types of any framework, by what they have."""

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
    """Memory by DLPack: torch, JAX, CuPy, NumPy."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsArrayInterface(Protocol):
    """Memory of the host by NumPy's protocol."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """Memory of a GPU by Numba's protocol."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Array = Union[SupportsBuffer, SupportsDlpack, SupportsArrayInterface, SupportsCudaArrayInterface]
"""Anything that has memory."""


class SupportsCudaStream(Protocol):
    """A stream by the protocol of cuda.core: mpgpu's, Numba's, torch's of late."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """A stream of torch."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int: ...


StreamLike = Union[SupportsIndex, SupportsCudaStream, TorchStream, CupyStream]
"""A stream: of a framework, of mpgpu, or its handle."""


class TorchDevice(Protocol):
    """A device of torch."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> Any: ...


class CupyDevice(Protocol):
    """A GPU of CuPy."""

    @property
    def id(self) -> int: ...


Device = Union[SupportsIndex, str, TorchDevice, CupyDevice]
"""A device: its number (GPUs from 0 up, ``mpgpu.HOST``, ``mpgpu.host(1)``), ``"cuda:0"``, ``"cuda"``, ``"cpu"``, a framework's object."""


class ElementTypeObject(Protocol):
    """An element type as NumPy, torch and ml_dtypes have it."""

    @property
    def itemsize(self) -> int: ...


ElementType = Union[str, type, ElementTypeObject]
"""An element type: ``"f4"``, ``"<f4"``, ``"float32"``, ``"bfloat16"``, ``float``, ``numpy.float32``, ``torch.float32``, …"""


class Communicator(Protocol):
    """What :class:`mpgpu.Node` asks of a communicator: mpi4py's have it."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...

    def allgather(self, sendobj: Any, /) -> Sequence[Any]: ...
