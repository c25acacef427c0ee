# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fixtures for tests of the installed package `mpgpu` on the host backend. `tests/python/run` builds the wheel and runs the tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

os.environ["MPGPU_BACKEND"] = "host"

import mpgpu
from mpgpu._library import NULL, check, ffi, lib


@pytest.fixture(scope="session")
def context() -> mpgpu.Context:
    return mpgpu.default_context()


class Gate:
    """Blocks the work of a stream until it is opened."""

    def __init__(self, stream: mpgpu.Stream) -> None:
        self._open = threading.Event()
        self._callback = ffi.callback("mp_host_function_t", self._wait)
        check(lib.mp_stream_launch_host(stream._context._handle, stream._handle, self._callback, NULL, NULL))

    def _wait(self, _: object) -> None:
        # The time limit lets a test fail that does not open the gate. Without it, the test would hang.
        self._open.wait(60)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def stream() -> Iterator[mpgpu.Stream]:
    stream = mpgpu.Stream(0)
    yield stream
    stream.synchronize()


@pytest.fixture
def gate(stream: mpgpu.Stream) -> Iterator[Gate]:
    gate = Gate(stream)
    yield gate
    gate.open()
    stream.synchronize()
