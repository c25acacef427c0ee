# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a copy needs is there until the copy is done, whoever has let go of it, and no longer."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import mpgpu
import numpy
import pytest
from mpgpu import _dropped


class Owned(numpy.ndarray):
    """An array that can be watched."""


def owned(count, value):
    array = numpy.empty(count, numpy.uint8).view(Owned)
    array[:] = value
    return array


def finished():
    """Lets go of executions that have finished, as later calls of any kind do."""
    while _dropped.held:
        _dropped.collect(len(_dropped.held))
    gc.collect()


def test_arrays_live_until_the_execution_that_nobody_holds_is_done(stream, gate):
    dst = mpgpu.empty(1 << 20)
    src = owned(1 << 20, 7)
    watched = weakref.ref(src)
    mpgpu.Plan([(dst, src)]).execute(stream)
    del src
    gc.collect()
    # Plan, request and array are out of scope, and the copy has not begun.
    later = mpgpu.empty(1)
    assert watched() is not None
    gate.open()
    stream.synchronize()
    assert (dst.numpy() == 7).all()
    finished()
    assert watched() is None
    del later


def test_a_request_holds_what_it_needs_until_it_was_waited_for(stream, gate):
    src, dst = owned(1000, 3), mpgpu.empty(1000)
    watched = weakref.ref(src)
    request = mpgpu.Plan([(dst, src)]).execute(stream)
    del src
    assert not request.done()
    gc.collect()
    assert watched() is not None
    gate.open()
    request.wait()
    assert watched() is None
    assert request.done()
    request.wait()
    assert (dst.numpy() == 3).all()


def test_destinations_live_as_long_as_sources(stream, gate):
    dst = owned(1000, 0)
    watched, memory = weakref.ref(dst), dst.ctypes.data
    request = mpgpu.Plan([(dst, owned(1000, 4))]).execute(stream)
    del dst
    gc.collect()
    assert watched().ctypes.data == memory
    gate.open()
    request.wait()
    assert watched() is None


def test_a_bytearray_cannot_be_resized_while_a_plan_has_it():
    dst = bytearray(100)
    plan = mpgpu.Plan([(dst, bytes(100))])
    with pytest.raises(BufferError):
        dst.extend(b"more")
    del plan
    dst.extend(b"more")


def test_dlpack_memory_is_given_back_when_the_plan_goes():
    src = owned(64, 1)
    watched = weakref.ref(src)

    class Producer:
        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

    plan = mpgpu.Plan([(bytearray(64), Producer(src))])
    del src
    gc.collect()
    assert watched() is not None
    plan.execute().wait()
    del plan
    gc.collect()
    assert watched() is None


def test_a_buffer_lives_as_long_as_an_array_of_it():
    context = mpgpu.Context("host")
    buffer = context.empty(1 << 20, device=0)
    before = context.device_statistics(0).allocated_bytes
    array, view = numpy.asarray(buffer), buffer.memoryview()
    del buffer
    gc.collect()
    array[:] = 9
    assert context.device_statistics(0).allocated_bytes == before
    del array
    gc.collect()
    assert view[5] == 9
    assert context.device_statistics(0).allocated_bytes == before
    del view
    gc.collect()
    assert context.device_statistics(0).allocated_bytes == before - (1 << 20)


def test_rows_hold_their_buffer():
    context = mpgpu.Context("host")
    rows = context.empty((10, 1000), device=0)[3:4]
    gc.collect()
    assert context.device_statistics(0).allocated_bytes == 10_000
    numpy.asarray(rows)[:] = 1
    del rows
    gc.collect()
    assert context.device_statistics(0).allocated_bytes == 0


def test_a_context_lives_as_long_as_what_was_made_with_it():
    context = mpgpu.Context("host")
    watched = weakref.ref(context)
    src, dst = context.empty(100, device=0), context.empty(100, device=1)
    src.numpy()[:] = 8
    plan = mpgpu.Plan([(dst, src)])
    del context, src
    gc.collect()
    plan.execute().wait()
    assert (dst.numpy() == 8).all()
    del plan
    gc.collect()
    assert watched() is not None
    del dst
    gc.collect()
    assert watched() is None


def test_many_executions_that_nobody_holds_are_forgotten_as_they_finish(stream):
    plan = mpgpu.Plan([(bytearray(1000), bytes(1000))])
    for _ in range(3000):
        plan.execute(stream)
        if len(_dropped.held) > 500:
            stream.synchronize()
    stream.synchronize()
    finished()
    assert not _dropped.held


@pytest.mark.parametrize("held", ["plan", "request", "nothing", "everything"])
def test_a_program_may_end_while_copies_run(held):
    program = """
import os, mpgpu
src, dst = mpgpu.empty(64 << 20, device=0), mpgpu.empty(64 << 20, device=1)
plan = mpgpu.Plan([(dst, src)])
request = plan.execute()
for _ in range(3):
    plan.execute()
held = os.environ["HELD"]
if held in ("plan", "nothing"): del request
if held in ("request", "nothing"): del plan, src, dst
print("end")
"""
    # The library reads no variable of that name.
    result = subprocess.run([sys.executable, "-c", program], env={**os.environ, "HELD": held}, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
