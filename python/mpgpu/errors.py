# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exceptions of mpgpu. The message comes from the library. It contains the invalid value and the remedy.

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
    """Base class of all exceptions of mpgpu."""

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
    """Raised if a buffer, device, stream or option is invalid, or if buffers of a batch overlap."""


class OutOfMemory(Error, MemoryError):
    """Raised if a device or the host has no more memory."""


class NotSupported(Error):
    """Raised if this machine or this build does not support the request. For example, no path connects two devices, there is no GPU driver,
    or memory cannot be shared.
    """


class ConfigurationError(Error):
    """Raised if the topology or an environment variable is invalid, or if the library has an incompatible version."""


class DriverError(Error):
    """Raised if the GPU driver or the operating system reported an error. ``driver_code`` is the code of that error."""


class DataCorruption(Error):
    """Raised if copied data differ from the source. Checked only with ``MPGPU_VERIFY=bytes``."""


class PeerGone(Error, ConnectionError):
    """Raised if a process on which the call depends has exited, or has freed memory that it shared."""


class Timeout(Error, builtins.TimeoutError):
    """Raised if the time limit of a wait has expired."""


class RankError(Error):
    """Raised if a collective call (made by all ranks of a node together) failed on another rank. The message contains the reason. Also
    raised if the allgather function failed.
    """


class MessageTruncated(Error):
    """Raised if a message is longer than the receive buffer. The message is not lost: a receive with a larger buffer still gets it."""

    bytes: int | None = None
    """Size of the message, bytes, if it is known."""


class Cancelled(Error):
    """Raised if a message was cancelled before it matched, or if its messenger was destroyed."""


class QueueFull(Error):
    """Raised if a message queue is full. Nothing was sent or received."""


class InternalError(Error):
    """Raised if a defect of mpgpu was detected. The context remains usable."""


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
