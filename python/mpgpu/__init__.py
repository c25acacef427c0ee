# SPDX-License-Identifier: MIT OR Apache-2.0
"""Moves data between the memories of one node (GPUs and host) over all suitable links.

    import mpgpu
    plan = mpgpu.Plan([(b, a), (d, c)])       # torch, CuPy, NumPy, JAX, mpgpu.empty(…)
    for step in range(steps):
        plan.execute()                        # in the current stream; does not block

Units are bytes and seconds. Devices are numbers (GPUs from 0 up, host memory ``HOST``) or names (``"cuda:0"``, ``"cpu"``). Every object may
be used from any thread. Failures raise an :class:`mpgpu.Error` with the library's message. Without a GPU everything runs on virtual
devices (``MPGPU_BACKEND=host``).
"""

from ._collective import all_gather, all_to_all, broadcast, gather, scatter
from ._context import Buffer, Context, DeviceStatistics, Registered, Statistics, default_context, devices, empty, host, probe, topo
from ._entry import Arrival, Entries, SentEntry
from ._library import HOST, version
from ._mapped import MappedFile
from ._message import ANY, Channel, Message, MessageInfo, Messenger, Receive
from ._node import End, HalfTransfer, Node, NodePlan, NodeTransfer, receive_from, send_to
from ._pieces import copy_blocks
from ._plan import Plan, PlanInfo, Request, copy
from ._streams import Stream
from .errors import (
    ArgumentError,
    Cancelled,
    ConfigurationError,
    DataCorruption,
    DriverError,
    Error,
    InternalError,
    MessageTruncated,
    NotSupported,
    OutOfMemory,
    PeerGone,
    QueueFull,
    RankError,
    Timeout,
)

__all__ = [
    "ANY",
    "HOST",
    "ArgumentError",
    "Arrival",
    "Buffer",
    "Cancelled",
    "Channel",
    "ConfigurationError",
    "Context",
    "DataCorruption",
    "DeviceStatistics",
    "DriverError",
    "End",
    "Entries",
    "Error",
    "HalfTransfer",
    "InternalError",
    "MappedFile",
    "Message",
    "MessageInfo",
    "MessageTruncated",
    "Messenger",
    "Node",
    "NodePlan",
    "NodeTransfer",
    "NotSupported",
    "OutOfMemory",
    "PeerGone",
    "Plan",
    "PlanInfo",
    "QueueFull",
    "RankError",
    "Receive",
    "Registered",
    "Request",
    "SentEntry",
    "Statistics",
    "Stream",
    "Timeout",
    "all_gather",
    "all_to_all",
    "broadcast",
    "copy",
    "copy_blocks",
    "default_context",
    "devices",
    "empty",
    "gather",
    "host",
    "probe",
    "receive_from",
    "scatter",
    "send_to",
    "topo",
    "version",
]

__version__ = version()
