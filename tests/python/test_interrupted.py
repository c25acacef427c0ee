# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that signal handlers that raise, like that of Ctrl-C, lose no work in progress."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import time
import weakref

import mpgpu
import numpy
import pytest
from mpgpu import _message, _plan
from test_lifetimes import finished, owned

# A handler may be called while the garbage collector frees an object. Python then prints a warning and continues.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Alarm(BaseException):
    pass


@pytest.fixture
def interrupted():
    """Returns `call(seconds, function)`.

    It calls `function`, raises an exception in a signal handler after `seconds` seconds, and returns true if this ended the call.
    """
    armed = False

    def handler(*_):
        nonlocal armed
        if armed:
            armed = False
            raise Alarm

    def call(seconds, function):
        nonlocal armed
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            function()
            armed = False
        except Alarm:
            return True
        return False

    before = signal.signal(signal.SIGALRM, handler)
    yield call
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def channel():
    return mpgpu.Channel(mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own]), 0)


def test_a_wait_for_a_message_that_does_not_come_is_interrupted(channel, interrupted):
    into = numpy.zeros(4, numpy.uint8)
    received = channel.receive(into)
    began = time.monotonic()
    timer = threading.Timer(10, lambda: channel.send(b"late"))
    timer.start()
    assert interrupted(0.2, received.synchronize)
    timer.cancel()
    assert time.monotonic() - began < 8
    # The receive continues, and a thread may also wait for it.
    assert not received.done() and received.info is None
    channel.send(b"abcd")
    waits = threading.Thread(target=received.synchronize)
    waits.start()
    waits.join(60)
    assert received.synchronize() == (0, 0, 4, b"") and bytes(into) == b"abcd"


def test_a_wait_for_an_execution_that_does_not_end_is_interrupted(stream, gate, interrupted):
    dst = numpy.zeros(100, numpy.uint8)
    request = mpgpu.Plan([(dst, numpy.full(100, 3, numpy.uint8))]).execute(stream)
    timer = threading.Timer(10, gate.open)
    timer.start()
    assert interrupted(0.2, request.synchronize)
    timer.cancel()
    assert not request.done()
    gate.open()
    request.synchronize()
    assert request.done() and (dst == 3).all()


@pytest.mark.parametrize("way", ["synchronize", "done"])
def test_what_a_message_has_met_is_known_whenever_a_look_at_it_was_interrupted(channel, interrupted, way):
    count, numbers = 0, random.Random(7)
    for number in range(600):
        into = numpy.zeros(8, numpy.uint8)
        received, sent = channel.receive(into), None
        if number % 2:
            assert received.cancel()
        else:
            sent = channel.send(numpy.full(8, number % 251, numpy.uint8))

        def look(received=received):
            with contextlib.suppress(mpgpu.Cancelled):
                while received.synchronize() is None if way == "synchronize" else not received.done():
                    pass

        count += interrupted(numbers.uniform(1e-6, 6e-5), look)
        if sent is None:
            with pytest.raises(mpgpu.Cancelled):
                received.synchronize()
        else:
            assert received.synchronize() == (0, 0, 8, b"")
            assert received.done() and (into == number % 251).all()
            sent.synchronize()
    assert count > 0


def interrupts(monkeypatch, module, name):
    """Makes a signal handler raise an exception as soon as a function of the library has returned."""
    function = getattr(module, name)

    def called(*arguments):
        assert function(*arguments) == 0
        raise Alarm

    monkeypatch.setattr(module, name, called)


def test_a_receive_that_nobody_got_to_see_is_cancelled_and_its_memory_held_until_then(channel, monkeypatch):
    into = owned(4, 0)
    watched = weakref.ref(into)
    with monkeypatch.context() as patch:
        interrupts(patch, _message, "_receive")
        with pytest.raises(Alarm):
            channel.receive(into)
    del into
    finished()
    assert watched() is None
    after = numpy.zeros(4, numpy.uint8)
    channel.send(b"abcd")
    received, until = channel.receive(after), time.monotonic() + 10
    while not received.done() and time.monotonic() < until:
        time.sleep(0.001)
    assert received.done() and bytes(after) == b"abcd"


def test_an_execution_that_nobody_got_to_see_holds_its_memory(stream, gate, monkeypatch):
    dst, src = numpy.zeros(1000, numpy.uint8), owned(1000, 5)
    watched = weakref.ref(src)
    plan = mpgpu.Plan([(dst, src)])
    with monkeypatch.context() as patch:
        interrupts(patch, _plan, "_execute")
        with pytest.raises(Alarm):
            plan.execute(stream)
    del plan, src
    gc.collect()
    assert watched() is not None
    gate.open()
    stream.synchronize()
    gc.collect()
    assert watched() is None and (dst == 5).all()
