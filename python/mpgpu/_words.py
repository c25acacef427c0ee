# SPDX-License-Identifier: MIT OR Apache-2.0
"""The library's texts in Python's words: what they name as C has it, by the name that it has here."""

from __future__ import annotations

import re

# Also of what only C and C++ have, because another rank of the node may have met it there.
IN_PYTHON = {
    "mp_alloc": "mpgpu.empty",
    "mp_alloc_shared": "mpgpu.empty(…, shared=True)",
    "mp_context_probe": "Context.probe",
    "mp_free": "the buffer's last reference",
    "mp_log_set_callback": "the call that sets the log's function",
    "mp_memory_export": "an export",
    "mp_memory_import": "an import",
    "mp_memory_register": "mpgpu.Registered",
    "mp_message_describe": "the description of a message",
    "mp_messenger_create": "mpgpu.Messenger()",
    "mp_node_create": "mpgpu.Node()",
    "mp_node_fail": "Node.fail()",
    "mp_node_plan": "Node.plan()",
    "mp_node_tune_partitions": "tuning partitions (in C and C++)",
    "mp_plan_arm": "arming the plan (in C and C++)",
    "MP_AGENT_AUTO": "any agent",
    "MP_AGENT_COPY_ENGINE": "copy engines",
    "MP_AGENT_PRODUCER": "producer",
    "MP_ALL_TO_ALL": "mpgpu.all_to_all",
    "MP_ANY_RANK": "mpgpu.ANY",
    "MP_BACKEND_AUTO": "'auto'",
    "MP_BACKEND_CUDA": "'cuda'",
    "MP_BROADCAST": "mpgpu.broadcast",
    "MP_DEFAULT": "None",
    "MP_DEVICE_AUTO": "None",
    "MP_DEVICE_HOST": "mpgpu.HOST",
    "MP_DEVICE_HOST_NUMA": "mpgpu.host",
    "MP_ENGINE_AUTO": "'auto'",
    "MP_ENGINE_KERNEL": "'kernel'",
    "MP_FORMAT_JSON": "describe_json",
    "MP_FORMAT_TEXT": "describe",
    "MP_LOG_OFF": "off",
    "MP_LOG_TRACE": "trace",
    "MP_OFF": "False",
    "MP_ON": "True",
    "MP_SIGNAL_WAIT_DEFAULT": "None",
    "MP_SIGNAL_WAIT_KERNEL": "'kernel'",
}

_NAME = re.compile(r"\b(?:mp|MP)_\w+")


def in_python(text: str) -> str:
    """A text of the library with its C names replaced. What is no name of C stays as it is."""
    return _NAME.sub(lambda name: IN_PYTHON.get(name[0], name[0]), text)
