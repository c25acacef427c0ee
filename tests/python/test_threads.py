# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests threads, several contexts, and children of fork."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import traceback

import mpgpu
import numpy
import pytest


def run(threads, function):
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for result in [pool.submit(function, number) for number in range(threads)]:
            result.result(timeout=300)


@pytest.mark.parametrize("own_context", [False, True])
def test_threads_plan_and_execute_at_once_and_every_byte_arrives(own_context):
    def work(number):
        context = mpgpu.Context("host") if own_context else mpgpu.default_context()
        random = numpy.random.default_rng(number)
        stream = mpgpu.Stream(int(random.integers(8)), context=context)
        for _ in range(20):
            count = int(random.integers(1, 2 << 20))
            src, dst = context.empty(count, device=int(random.integers(-1, 8))), context.empty(count, device=int(random.integers(-1, 8)))
            plan = mpgpu.Plan([(dst, src)], context=context)
            for _ in range(3):
                src.numpy()[:] = random.integers(0, 256, count, dtype=numpy.uint8)
                plan.execute(stream).synchronize()
                assert numpy.array_equal(dst.numpy(), src.numpy())

    run(6, work)


def test_one_plan_may_be_executed_by_many_threads():
    src, dst = mpgpu.empty(4 << 20, device=0), mpgpu.empty(4 << 20, device=1)
    src.numpy()[:] = 6
    plan = mpgpu.Plan([(dst, src)])
    # All executions run in the library's stream, one after the other.
    run(6, lambda _: [plan.execute().synchronize() for _ in range(20)])
    assert (dst.numpy() == 6).all()


def test_many_threads_may_wait_for_one_request(stream, gate):
    request = mpgpu.Plan([(bytearray(100), bytes(100))]).execute(stream)
    waiting = threading.Barrier(5)

    def wait(_):
        waiting.wait()
        request.synchronize()
        assert request.done()

    threads = [threading.Thread(target=wait, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    waiting.wait()
    # The call does not block, even if another thread waits.
    assert not request.done()
    gate.open()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert request.done()


def test_waiting_lets_other_threads_run(stream, gate):
    request = mpgpu.Plan([(bytearray(100), bytes(100))]).execute(stream)
    thread = threading.Thread(target=request.synchronize)
    thread.start()
    # This thread opens the gate. It could not do so if the other thread held the interpreter lock while it waits.
    gate.open()
    thread.join(60)
    assert not thread.is_alive()


def test_contexts_share_nothing():
    one, other = mpgpu.Context("host", topology="beluga"), mpgpu.Context("host", topology="summit")
    assert (one.topo()["name"], other.topo()["name"]) == ("beluga", "summit")
    assert (one.gpus, one.devices[:2]) == (4, [0, 1])
    src, dst = one.empty(100, device=0), one.empty(100, device=3)
    mpgpu.copy(dst, src)
    assert one.statistics().executions == 1
    assert one.statistics().bytes == 100
    assert other.statistics().executions == 0
    assert one.device_statistics(3).allocated_bytes == 100
    assert one.uuid(0) != one.uuid(1)
    assert len(one.uuid(mpgpu.HOST)) == 16
    assert "beluga" in one.describe()
    assert one.describe_json()["backend"] == one.backend == "host"


def in_child(function):
    """Runs a function in a child process created by fork, and raises the exceptions of the function."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            os.write(write, b"done")
        except BaseException:
            os.write(write, traceback.format_exc().encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answers:
        answer = answers.read().decode()
    os.waitpid(child, 0)
    assert answer == "done", answer


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_of_fork_has_a_default_context_of_its_own(context):
    src, dst = numpy.full(1000, 3, numpy.uint8), numpy.zeros(1000, numpy.uint8)
    plan = mpgpu.Plan([(dst, src)])
    plan.execute()

    def child():
        nonlocal plan
        with pytest.raises(mpgpu.ArgumentError) as caught:
            plan.execute()
        assert caught.value.status == "MP_ERROR_INVALID_HANDLE"
        del plan
        mpgpu.copy(dst, src)
        assert (dst == 3).all()
        buffer = mpgpu.empty(100, device=0)
        assert buffer.context is not context

    in_child(child)
    dst[:] = 0
    plan.execute().synchronize()
    assert (dst == 3).all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_buffers_of_the_parent_may_go_in_a_child(context):
    buffer = mpgpu.empty(1000, device=0)
    buffer.numpy()[:] = 5

    def child():
        nonlocal buffer
        del buffer

    in_child(child)
    assert (buffer.numpy() == 5).all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_of_fork_makes_no_channel_of_a_node_of_its_parent_and_does_not_wait():
    node = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own])

    def child():
        with pytest.raises(mpgpu.ArgumentError):
            mpgpu.Channel(node, 0)

    # The lock is held as if another thread were creating the node's first channel.
    with node._lock:
        in_child(child)
    mpgpu.Channel(node, 0)
