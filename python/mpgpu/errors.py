# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exceptions of mpgpu. The message comes from the library: it names the invalid value and the remedy.

Every class derives from :class:`Error`. Some also derive from the corresponding built-in exception.
"""

from __future__ import annotations

import builtins

__all__ = [
    "ArgumentError",
    "Cancelled",
    "ConfigurationError",
    "DataCorruption",
    "DriverError",
    "Error",
    "InternalError",
    "MessageTruncated",
    "NotSupported",
    "OutOfMemory",
    "PeerGone",
    "QueueFull",
    "RankError",
    "Timeout",
]


class Error(RuntimeError):
    """Error that a call to mpgpu has raised; base class of all others."""

    status: str
    """Name of the status in C, for example ``MP_ERROR_OVERLAP``."""
    driver_code: int
    """Error code of the GPU driver or the operating system; 0 if neither reported an error."""
    argument: str | None
    """Name of the invalid parameter, if there is one."""

    def __init__(
        self, message: str, *, status: str = "MP_ERROR_INVALID_ARGUMENT", driver_code: int = 0, argument: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.driver_code = driver_code
        self.argument = argument


class ArgumentError(Error, ValueError):
    """Invalid buffer, device, stream or option, or overlapping buffers of a batch."""


class OutOfMemory(Error, MemoryError):
    """Memory of a device or the host is exhausted."""


class NotSupported(Error):
    """Request that this machine or this build does not support: a path between two devices, a driver, a kind of memory."""


class ConfigurationError(Error):
    """Invalid topology, environment variable or version of the library."""


class DriverError(Error):
    """Error of the GPU driver or the operating system; ``driver_code`` is its code."""


class DataCorruption(Error):
    """Data that arrived corrupted. Checked only with ``MPGPU_VERIFY=bytes``."""


class PeerGone(Error, ConnectionError):
    """Peer that has exited, or that has freed memory which it shared."""


class Timeout(Error, builtins.TimeoutError):
    """Wait that has exceeded its time limit."""


class RankError(Error):
    """Failure of a call that all ranks of a node make: on another rank, whose reason the message contains, or in the allgather function."""


class MessageTruncated(Error):
    """Message that is longer than the receive buffer. It was not received; a larger buffer can still receive it."""

    bytes: int | None = None
    """Size of the message, bytes, if it is known."""


class Cancelled(Error):
    """Message that was cancelled before it matched, or whose messenger was destroyed."""


class QueueFull(Error):
    """Queue without room for another message. Nothing was sent or received."""


class InternalError(Error):
    """Defect of mpgpu. The context stays usable."""


BY_STATUS: dict[str, type[Error]] = {
    "MP_ERROR_INVALID_ARGUMENT": ArgumentError,
    "MP_ERROR_INVALID_HANDLE": ArgumentError,
    "MP_ERROR_INVALID_DEVICE": ArgumentError,
    "MP_ERROR_INVALID_POINTER": ArgumentError,
    "MP_ERROR_OVERLAP": ArgumentError,
    "MP_ERROR_NO_ROUTE": NotSupported,
    "MP_ERROR_OUT_OF_MEMORY": OutOfMemory,
    "MP_ERROR_NOT_SUPPORTED": NotSupported,
    "MP_ERROR_NO_DRIVER": NotSupported,
    "MP_ERROR_DRIVER": DriverError,
    "MP_ERROR_TOPOLOGY": ConfigurationError,
    "MP_ERROR_ENVIRONMENT": ConfigurationError,
    "MP_ERROR_VERSION_MISMATCH": ConfigurationError,
    "MP_ERROR_DATA_CORRUPTION": DataCorruption,
    "MP_ERROR_INTERNAL": InternalError,
    "MP_ERROR_PEER_GONE": PeerGone,
    "MP_ERROR_TIMEOUT": Timeout,
    "MP_ERROR_RANK_FAILED": RankError,
    "MP_ERROR_ALLGATHER": RankError,
    "MP_ERROR_MESSAGE_TRUNCATED": MessageTruncated,
    "MP_ERROR_CANCELLED": Cancelled,
    "MP_ERROR_QUEUE_FULL": QueueFull,
}
