# SPDX-License-Identifier: MIT OR Apache-2.0
"""What mpgpu raises. The text is the library's own: it names the value at fault and the remedy.

Every class derives from :class:`Error`; some also from the built-in exception that a Python programmer would expect.
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
    """A call of mpgpu has failed."""

    status: str
    """Name of the status in C, ``MP_ERROR_OVERLAP`` say."""
    driver_code: int
    """The GPU driver's code, or the operating system's; 0 where neither was at fault."""
    argument: str | None
    """Name of the parameter at fault, where there is one."""

    def __init__(
        self, message: str, *, status: str = "MP_ERROR_INVALID_ARGUMENT", driver_code: int = 0, argument: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.driver_code = driver_code
        self.argument = argument


class ArgumentError(Error, ValueError):
    """A buffer, a device, a stream or an option is not accepted, or buffers of a batch overlap."""


class OutOfMemory(Error, MemoryError):
    """A device or the host has no memory left."""


class NotSupported(Error):
    """This machine or this build does not have what was asked for: a path between two devices, a driver, a kind of memory."""


class ConfigurationError(Error):
    """The topology, a variable of the environment or the version of the library is at fault."""


class DriverError(Error):
    """The GPU driver or the operating system refused; ``driver_code`` has its code."""


class DataCorruption(Error):
    """Bytes arrived wrong. Only looked for with ``MPGPU_VERIFY=bytes``."""


class PeerGone(Error, ConnectionError):
    """Another process has ended, or has freed what it shared."""


class Timeout(Error, builtins.TimeoutError):
    """What was waited for has not come in time."""


class RankError(Error):
    """A call that all ranks of a node make failed on another rank, whose reason the text has, or in the allgather."""


class MessageTruncated(Error):
    """A message is longer than the buffer that it was to go to. It was not received, and can be, into a larger one."""

    bytes: int | None = None
    """Its size, where it is known."""


class Cancelled(Error):
    """A message was cancelled before it matched, or its messenger destroyed."""


class QueueFull(Error):
    """There is no room for another message. Nothing was sent or received."""


class InternalError(Error):
    """A defect of mpgpu. The context stays usable."""


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
