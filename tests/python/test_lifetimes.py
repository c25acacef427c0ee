# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that the objects of a copy exist until the copy is done, even if the program has dropped them, and no longer."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import importlib.util
import os
import pickle
import pkgutil
import subprocess
import sys
import weakref

import mpgpu
import numpy
import pytest
from mpgpu import _dropped, _library, _plan


class Owned(numpy.ndarray):
    """Array whose lifetime can be observed."""


def owned(count, value):
    array = numpy.empty(count, numpy.uint8).view(Owned)
    array[:] = value
    return array


def finished():
    """Drops finished executions, as any later call of the library does."""
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
    # Plan, request and array are out of scope now, and the copy has not begun.
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
    request.synchronize()
    assert watched() is None
    assert request.done()
    request.synchronize()
    assert (dst.numpy() == 3).all()


def test_destinations_live_as_long_as_sources(stream, gate):
    dst = owned(1000, 0)
    watched, memory = weakref.ref(dst), dst.ctypes.data
    request = mpgpu.Plan([(dst, owned(1000, 4))]).execute(stream)
    del dst
    gc.collect()
    assert watched().ctypes.data == memory
    gate.open()
    request.synchronize()
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
    plan.execute().synchronize()
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


def test_registered_memory_is_held_and_unpinned_at_the_end():
    array = owned(3 << 20, 7)
    gone = weakref.ref(array)
    on_gpu = mpgpu.empty(array.nbytes, device=0)
    with mpgpu.Registered(array, huge_pages=True) as pinned:
        assert pinned.nbytes == array.nbytes
        assert repr(pinned) == f"<mpgpu.Registered: {array.nbytes} bytes>"
        with pytest.raises(mpgpu.ArgumentError, match="pinned already"):
            mpgpu.Registered(array)
        plan = mpgpu.Plan([(on_gpu, array)])
        plan.execute().synchronize()
        assert (numpy.asarray(on_gpu) == 7).all()
    assert "closed" in repr(pinned)
    pinned.close()
    with pytest.raises(mpgpu.ArgumentError, match="unregistered after the plan was made"):
        plan.execute()
    del plan
    again = mpgpu.Registered(array)
    del array
    gc.collect()
    assert gone() is not None, "registered memory was freed"
    del again
    finished()
    assert gone() is None


def test_what_is_pinned_or_not_the_cpus_is_not_registered():
    for memory in (mpgpu.empty(64), mpgpu.empty(64, device=0)):
        with pytest.raises(mpgpu.ArgumentError, match="is an allocation of mpgpu"):
            mpgpu.Registered(memory)
    with pytest.raises(mpgpu.ArgumentError, match="bytes=0"):
        mpgpu.Registered(bytearray())
    with pytest.raises(TypeError, match="memory is a int"):
        mpgpu.Registered(7)
    # Read-only memory can be a source.
    text = b"constant" * 1000
    with mpgpu.Registered(text):
        on_gpu = mpgpu.empty(len(text), device=1)
        mpgpu.copy(on_gpu, text)
    assert bytes(numpy.asarray(on_gpu)) == text


def test_a_mapped_file_is_held_by_what_is_made_of_it(tmp_path):
    path = tmp_path / "numbers"
    numbers = numpy.arange(100_000, dtype=numpy.int32)
    numbers.tofile(path)
    on_gpu = mpgpu.empty(4000, device=0)
    with path.open("rb") as opened:
        for source in (path, str(path), os.fsencode(path), opened, opened.fileno()):
            for cache in (True, False):
                file = mpgpu.MappedFile(source, cache=cache)
                assert len(file) == file.nbytes == numbers.nbytes
                assert repr(file) == f"<mpgpu.MappedFile: {numbers.nbytes} bytes>"
                part = file[400:4400]
                gone = weakref.ref(file)
                del file
                mpgpu.copy(on_gpu, part)
                assert gone() is None
                assert (numpy.asarray(on_gpu).view(numpy.int32) == numbers[100:1100]).all()
                assert part.readonly
    with mpgpu.MappedFile(path) as file:
        with pytest.raises(TypeError, match="must be a range of bytes"):
            file[3]
    assert repr(file).endswith("closed>")
    file.close()
    with pytest.raises(mpgpu.ArgumentError, match="the file is closed"):
        file[:]


def test_what_cannot_be_mapped_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(mpgpu.NotSupported, match="the file is empty"):
        mpgpu.MappedFile(tmp_path / "empty")
    with pytest.raises(mpgpu.NotSupported, match="not a regular file"):
        mpgpu.MappedFile("/dev/null")
    with pytest.raises(FileNotFoundError):
        mpgpu.MappedFile(tmp_path / "none")
    with pytest.raises(mpgpu.ArgumentError, match="descriptor=-1"):
        mpgpu.MappedFile(-1)
    with pytest.raises(TypeError, match=r"file=7\.5"):
        mpgpu.MappedFile(7.5)


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
    plan.execute().synchronize()
    assert (dst.numpy() == 8).all()
    del plan
    gc.collect()
    assert watched() is not None
    del dst
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(
    "made",
    [
        "channel.receive(bytearray(8))",
        "channel.receive(memoryview(bytearray(8)))",
        "channel.send(bytes(8))",
        "plan(memoryview(bytearray(8)))",
    ],
)
def test_the_garbage_collector_may_free_a_cycle_with_memory_of_any_kind(made):
    program = f"""
import gc, mpgpu
channel = mpgpu.Channel(mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own]), 0)
plan = lambda memory: mpgpu.Plan([(memory, bytes(8))])
for _ in range(3):
    cycle = [{made}]
    cycle.append(cycle)
    del cycle
    gc.collect()
from mpgpu import _dropped, _memory
_dropped.collect(100)
gc.collect()
assert not _memory._of_views
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_memory_whose_view_was_released_cannot_be_resized_while_a_plan_has_it():
    memory = bytearray(8)
    view = memoryview(memory)
    plan = mpgpu.Plan([(view, bytes(range(8)))])
    view.release()
    with pytest.raises(BufferError):
        memory.extend(b"more")
    plan.execute().synchronize()
    del plan
    memory.extend(b"more")
    assert memory == bytes(range(8)) + b"more"


def test_what_a_dropped_request_held_is_let_go_when_its_stream_is_synchronized(stream):
    src = owned(1000, 7)
    watched = weakref.ref(src)
    mpgpu.Plan([(bytearray(1000), src)]).execute(stream)
    del src
    stream.synchronize()
    gc.collect()
    assert watched() is None


def test_a_plan_whose_streams_are_not_found_is_given_back(monkeypatch):
    class Lost:
        is_known, key = False, 1

        def handle(self):
            raise RuntimeError("no stream")

    def memory_of(*arguments, of=_plan.memory_of):
        memory = of(*arguments)
        memory.current, memory.settle = Lost(), True
        return memory

    unraisable, destroyed, destroy = [], [], mpgpu.Plan.__del__.__defaults__[0]
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(mpgpu.Plan.__del__, "__defaults__", (lambda handle: destroyed.append(destroy(handle)),))
    monkeypatch.setattr(_plan, "memory_of", memory_of)
    context = mpgpu.Context("host")
    context._backend = "cuda"
    with pytest.raises(RuntimeError, match="no stream"):
        mpgpu.Plan([(bytearray(8), bytes(8))], context=context)
    gc.collect()
    assert (unraisable, destroyed) == ([], [0])


def test_a_collection_between_a_failure_and_its_text_leaves_the_text(monkeypatch):
    channel = mpgpu.Channel(mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own]), 0)
    cycle = [channel.receive(numpy.zeros(4))]
    cycle.append(cycle)
    del cycle

    def sized(kind, of=_library.sized):
        if kind.startswith("mp_error"):
            gc.collect()
        return of(kind)

    monkeypatch.setattr(_library, "sized", sized)
    with pytest.raises(mpgpu.ArgumentError, match="device 99 does not exist"):
        mpgpu.Stream(99)


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
    # The library does not read this variable.
    result = subprocess.run([sys.executable, "-c", program], env={**os.environ, "HELD": held}, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


# Modules that import torch.
OF_TORCH = {"mpgpu.torch", "mpgpu._fill", "mpgpu._load", "mpgpu._save", "mpgpu._torch_devices", "mpgpu._trees"}


def every_class():
    """Returns all classes that the package defines, except the loader of ``mpgpu.vllm``, which vLLM imports and which owns nothing."""
    left_out = {"mpgpu._native", "mpgpu.typing", "mpgpu.vllm"} | (OF_TORCH if importlib.util.find_spec("torch") is None else set())
    for module in pkgutil.iter_modules(mpgpu.__path__, "mpgpu."):
        if module.name not in left_out:
            for found in vars(importlib.import_module(module.name)).values():
                if isinstance(found, type) and found.__module__ == module.name:
                    yield found


# Classes that own no resources of the library. A new class must be added here, unless its objects cannot be copied.
PLAIN = {"Arrival", "Current", "Entries", "Memory", "Owner", "Part", "SentEntry", "Storages"}
PLAIN |= {"Filler", "NewFile", "Progress", "Segments", "Writers", "Written", "_Batch", "_State"}
PLAIN |= {"_Contents", "_End", "_First", "_Freed", "_Gathering", "_Index", "_Nothing", "_Used", "_Waiting"}
OWNERS = sorted(
    {
        found
        for found in every_class()
        if not issubclass(found, (tuple, BaseException, ctypes.Structure)) and (found.__name__ not in PLAIN or hasattr(found, "__del__"))
    },
    key=lambda found: found.__name__,
)


def test_the_classes_that_own_something_are_found():
    known = {"Buffer", "Channel", "Context", "Message", "Messenger", "Node", "NodePlan", "Plan", "Receive", "Request", "Stream"}
    assert known <= {found.__name__ for found in OWNERS}


@pytest.mark.parametrize("kind", OWNERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, *(functools.partial(pickle.dumps, protocol=number) for number in range(pickle.HIGHEST_PROTOCOL + 1))],
)
def test_what_owns_something_of_the_library_is_not_duplicated(kind, duplicate):
    with pytest.raises(TypeError, match=rf"mpgpu\.{kind.__name__} cannot be copied or pickled"):
        duplicate(object.__new__(kind))


def test_an_object_works_after_a_copy_of_it_was_refused(context):
    own = mpgpu.Context("host", topology="beluga")
    a, b, stream = own.empty(100), own.empty(100), mpgpu.Stream(0, context=own)
    a.numpy()[:] = 5
    plan = mpgpu.Plan([(b, a)])
    request = plan.execute(stream)
    node = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own], context=own)
    channel = mpgpu.Channel(node, 0)
    for each in (own, a, a[2:5], stream, plan, request, node, channel, node._messenger, channel.send(a)):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.copy(each)
    gc.collect()
    request.synchronize()
    plan.execute(stream).synchronize()
    assert (b.numpy() == 5).all()
