# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests channels and tagged messages between two to four processes, and within one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref

import mpgpu
import numpy
import pytest
from conftest import Gate
from test_node import start

LARGE = 3 << 20


def node_of(rank, ranks, folder):
    return mpgpu.Node(rank=rank, ranks=ranks, socket=folder / "ranks", devices=[rank])


def pattern(rank, number, count):
    return numpy.random.default_rng(1000 * rank + number).integers(0, 256, count, dtype=numpy.uint8)


def memory(kind, context, rank, count):
    """Allocates `count` bytes of the given kind of memory and returns them as a NumPy array."""
    if kind == "ordinary":
        return numpy.zeros(count, dtype=numpy.uint8)
    return context.empty(count, device=rank if kind == "device" else mpgpu.HOST, shared=True).numpy()


def meet(channels):
    """Waits until all ranks have made this call, because no rank may exit while others still receive."""
    token = numpy.zeros(1, dtype=numpy.uint8)
    sends = [channel.send(token.copy()) for channel in channels]
    for channel in channels:
        channel.receive(token).synchronize()
    for send in sends:
        send.synchronize()


def others(node):
    return [mpgpu.Channel(node, rank) for rank in range(node.ranks) if rank != node.rank]


# --- Channels between processes ---------------------------------------------------------------------------------------------
def every_byte(rank, ranks, _, folder):
    """Sends messages of many sizes from each rank to each other rank, from and into memory of every kind, and checks every byte."""
    node = node_of(rank, ranks, folder)
    channels = others(node)
    kinds = ["ordinary", "host", "device"]
    sizes = [0, 1, 7, 1024, 1025, 4096, 65537, 1 << 20, LARGE]

    async def exchange(channel, number, size):
        out, into = memory(kinds[number % 3], node.context, rank, size), memory(kinds[number // 3 % 3], node.context, rank, size + 5)
        out[:] = pattern(rank, number, size)
        sent = channel.send(out)
        found = await channel.receive(into)
        await sent
        assert (found.rank, found.bytes, found.metadata) == (channel.rank, size, b"")
        assert numpy.array_equal(into[:size], pattern(channel.rank, number, size))
        assert not into[size:].any()

    async def all_of_them():
        for number in range(18):
            await asyncio.gather(*(exchange(channel, number, sizes[number % len(sizes)]) for channel in channels))

    asyncio.run(all_of_them())
    meet(channels)


def in_order(rank, ranks, _, folder):
    """Tests that messages of a channel arrive in order, however the program waits for them, and do not match messages of other channels."""
    node = node_of(rank, ranks, folder)
    first, second = mpgpu.Channel(node, 1 - rank), mpgpu.Channel(node, 1 - rank)
    count = 300
    if rank == 0:
        sends = [channel.send(numpy.array([number, channel is second])) for number in range(count) for channel in (first, second)]
        for message in sends:
            message.synchronize()
    else:
        # The messages of the second channel are received first, although they were sent later.
        for channel in (second, first):
            values = numpy.zeros((count, 2), dtype=numpy.int64)
            messages = [channel.receive(row) for row in values]

            async def await_all(messages=messages):
                await asyncio.gather(*reversed(messages))

            asyncio.run(await_all())
            assert values[:, 0].tolist() == list(range(count))
            assert (values[:, 1] == (channel is second)).all()
    meet([first])


def many_at_once(rank, ranks, _, folder):
    """Tests that hundreds of awaits in one thread proceed concurrently while other tasks of the event loop run."""
    node = node_of(rank, ranks, folder)
    channels = [mpgpu.Channel(node, 1 - rank) for _ in range(400)]
    begin, end = mpgpu.Channel(node, 1 - rank), mpgpu.Channel(node, 1 - rank)

    async def receive(channel, number):
        value = numpy.zeros(1, dtype=numpy.int64)
        await channel.receive(value)
        assert value[0] == number
        return 1

    async def tick(ticks):
        while True:
            ticks.append(0)
            await asyncio.sleep(0.001)

    async def receiver():
        ticks = []
        ticker = asyncio.ensure_future(tick(ticks))
        receives = [asyncio.ensure_future(receive(channel, number)) for number, channel in enumerate(channels)]
        while len(ticks) < 5:
            await asyncio.sleep(0.001)
        assert not any(task.done() for task in receives)
        await begin.send(b"x")
        assert sum(await asyncio.gather(*receives)) == len(channels)
        ticker.cancel()

    async def sender():
        await begin.receive(bytearray(1))
        order = numpy.random.default_rng(1).permutation(len(channels))
        await asyncio.gather(*(channels[number].send(numpy.array([number])) for number in order))

    asyncio.run(sender() if rank == 0 else receiver())
    meet([end])


def ping_pong(rank, ranks, _, folder):
    """Makes a few thousand round trips, and another one after a pause in which the loop sleeps. Other tasks must also run."""
    node = node_of(rank, ranks, folder)
    channel = mpgpu.Channel(node, 1 - rank)
    turns = []

    async def others_turn():
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    async def play():
        other = asyncio.ensure_future(others_turn())
        ball = numpy.zeros(4096, dtype=numpy.uint8)
        for number in range(2000):
            if number % 500 == 499 and rank == 0:
                other.cancel()
                await asyncio.sleep(0.05)
            if rank == 0:
                ball[:] = number % 251
                await channel.send(ball)
            await channel.receive(ball)
            assert (ball == number % 251).all()
            if rank == 1:
                await channel.send(ball)
        other.cancel()

    asyncio.run(play())
    assert len(turns) > 3
    meet([channel])


def cancelled(rank, ranks, _, folder):
    """Tests that a cancelled task cancels its receive.

    The next receive gets the message, and the memory of the first one is not changed.
    """
    node = node_of(rank, ranks, folder)
    channel, other = mpgpu.Channel(node, 1 - rank), mpgpu.Channel(node, 1 - rank)

    async def receiver():
        first, second = numpy.zeros(8, dtype=numpy.uint8), numpy.zeros(8, dtype=numpy.uint8)
        for wait in (0, 0.02):
            task = asyncio.ensure_future(waits_for(channel.receive(first)))
            await asyncio.sleep(wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.receive(first), 0.01)
        await other.send(b"x")
        await channel.receive(second)
        assert not first.any() and (second == 7).all()
        # The receive is cancelled by an explicit call. A call that waits for it raises the error, whichever thread has cancelled the
        # receive.
        message = channel.receive(first)
        seen = []
        waits = threading.Thread(target=lambda: seen.append(is_cancelled(message)))
        waits.start()
        assert message.cancel() and not message.cancel()
        waits.join()
        assert seen == [None]
        with pytest.raises(mpgpu.Cancelled):
            await message

    async def sender():
        await other.receive(bytearray(1))
        await channel.send(numpy.full(8, 7, dtype=numpy.uint8))

    asyncio.run(receiver() if rank == 0 else sender())
    meet([other])


def is_cancelled(message):
    with pytest.raises(mpgpu.Cancelled):
        message.synchronize()


async def waits_for(message):
    return await message


def cancelled_in_flight(rank, ranks, _, folder):
    """Tests that a cancelled task waits for the message's data if the message has already matched, and is cancelled after that."""
    node = node_of(rank, ranks, folder)
    channel, other = mpgpu.Channel(node, 1 - rank), mpgpu.Channel(node, 1 - rank)
    stream = mpgpu.Stream(rank)
    if rank == 0:
        gate = Gate(stream)
        # The receive matches as soon as it is posted, but its data arrives only when the stream reaches the send.
        out = memory("device", node.context, rank, LARGE)
        out[:] = 9
        sent = channel.send(out, stream)
        other.send(b"posted").synchronize()
        other.receive(bytearray(7)).synchronize()
        gate.open()
        sent.synchronize()
    else:
        other.receive(bytearray(6)).synchronize()

        async def receiver():
            into = memory("device", node.context, rank, LARGE)
            message = channel.receive(into)
            task = asyncio.ensure_future(waits_for(message))
            await asyncio.sleep(0.02)
            assert message.info.bytes == LARGE
            task.cancel()
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
            await other.send(b"waiting")
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (into == 9).all()

        asyncio.run(receiver())
    meet([other])


def truncated(rank, ranks, _, folder):
    """Tests that a message which is longer than the buffer causes an error with the message's length, and that nothing is lost."""
    node = node_of(rank, ranks, folder)
    channel, other = mpgpu.Channel(node, 1 - rank), mpgpu.Channel(node, 1 - rank)
    if rank == 0:
        sent = channel.send(pattern(0, 1, LARGE))
        other.receive(bytearray(1)).synchronize()
        sent.synchronize()
    else:
        small, enough = numpy.zeros(LARGE - 1, dtype=numpy.uint8), numpy.zeros(LARGE, dtype=numpy.uint8)
        with pytest.raises(mpgpu.MessageTruncated) as caught:
            asyncio.run(waits_for(channel.receive(small)))
        assert caught.value.bytes == LARGE and caught.value.status == "MP_ERROR_MESSAGE_TRUNCATED"
        assert not small.any()
        channel.receive(enough).synchronize()
        assert numpy.array_equal(enough, pattern(0, 1, LARGE))
        other.send(b"x").synchronize()


def peer_is_killed(rank, ranks, _, folder):
    """Tests that killing a rank ends only the operations that wait for this rank, in tasks and in threads."""
    node = node_of(rank, ranks, folder)
    channels = {other: mpgpu.Channel(node, other) for other in range(ranks) if other != rank}
    meet(list(channels.values()))
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    async def receiver():
        receives = [waits_for(channels[1].receive(bytearray(8))) for _ in range(5)]
        alive = asyncio.ensure_future(waits_for(channels[2 - rank].receive(bytearray(8))))
        for ended in await asyncio.gather(*receives, return_exceptions=True):
            assert isinstance(ended, mpgpu.PeerGone) and isinstance(ended, ConnectionError), ended
        await asyncio.sleep(0)
        await channels[2 - rank].send(b"8 bytes.")
        assert (await alive).bytes == 8

    asyncio.run(receiver())
    with pytest.raises(mpgpu.PeerGone):
        channels[1].receive(bytearray(8)).synchronize()
    meet([channels[2 - rank]])


def in_threads(rank, ranks, _, folder):
    """Tests that threads with separate event loops and threads that block can use one messenger concurrently."""
    node = node_of(rank, ranks, folder)
    channels = [mpgpu.Channel(node, 1 - rank) for _ in range(4)]
    end = mpgpu.Channel(node, 1 - rank)
    errors = []

    async def awaits(channel, number):
        into = numpy.zeros(5000, dtype=numpy.uint8)
        for step in range(100):
            sent = channel.send(pattern(rank, 100 * number + step, 5000))
            await channel.receive(into)
            await sent
            assert numpy.array_equal(into, pattern(1 - rank, 100 * number + step, 5000))

    def blocks(channel, number):
        into = numpy.zeros(5000, dtype=numpy.uint8)
        for step in range(100):
            sent = channel.send(pattern(rank, 100 * number + step, 5000))
            channel.receive(into).synchronize()
            sent.synchronize()
            assert numpy.array_equal(into, pattern(1 - rank, 100 * number + step, 5000))

    def run(number):
        try:
            if number % 2:
                asyncio.run(awaits(channels[number], number))
            else:
                blocks(channels[number], number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    meet([end])


def tagged(rank, ranks, _, folder):
    """Tests tags, masks, receives from any rank, metadata and probing. Channels of the same messenger must not interfere."""
    node = node_of(rank, ranks, folder)
    messenger = mpgpu.Messenger(node)
    channel = mpgpu.Channel(messenger, (rank + 1) % ranks)
    back = channel if ranks == 2 else mpgpu.Channel(messenger, (rank - 1) % ranks)
    of_the_channel = channel.send(b"of the channel")
    if rank:
        messenger.send(pattern(rank, 1, 1000), 0, 0x1_0000 + rank, metadata=f"from {rank}".encode()).synchronize()
        messenger.send(pattern(rank, 2, 10), 0, 5).synchronize()
        messenger.receive(bytearray(1), 0, 9).synchronize()
    else:
        into = numpy.zeros(1000, dtype=numpy.uint8)
        seen = set()
        for _ in range(ranks - 1):
            found = messenger.receive(into, tag=0x1_0000, mask=0xFFFF_0000).synchronize()
            assert found == (found.rank, 0x1_0000 + found.rank, 1000, f"from {found.rank}".encode())
            assert numpy.array_equal(into, pattern(found.rank, 1, 1000))
            seen.add(found.rank)
        assert seen == set(range(1, ranks))
        for other in reversed(range(1, ranks)):
            while not (found := messenger.probe(other)):
                time.sleep(0.001)
            assert found == (other, 5, 10, b"")
            assert messenger.receive(into, other, mpgpu.ANY).synchronize() == found
            assert numpy.array_equal(into[:10], pattern(other, 2, 10))
        assert messenger.probe() is None
        assert messenger.probe(1, 7) is None
        for other in range(1, ranks):
            messenger.send(b"x", other, 9).synchronize()
    into = bytearray(14)
    back.receive(into).synchronize()
    assert into == b"of the channel"
    of_the_channel.synchronize()
    meet(others(node))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_byte_of_every_kind_of_memory_arrives(ranks, tmp_path):
    start(ranks, every_byte, tmp_path)


@pytest.mark.parametrize("scenario", [in_order, many_at_once, ping_pong, cancelled, cancelled_in_flight, truncated, in_threads, tagged])
def test_two_ranks(scenario, tmp_path):
    start(2, scenario, tmp_path)


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_find_messages_by_tag(ranks, tmp_path):
    start(ranks, tagged, tmp_path)


def test_a_rank_that_is_killed_ends_what_concerns_it(tmp_path):
    start(3, peer_is_killed, tmp_path, killed={1})


# --- Within one process -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def alone():
    return mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own])


def test_a_channel_to_the_own_rank_receives_what_it_has_sent(alone):
    channel = mpgpu.Channel(alone, 0)
    for size in (0, 8, 5000, LARGE):
        into = numpy.zeros(size, dtype=numpy.uint8)
        received = channel.receive(into)
        sent = channel.send(pattern(0, size, size))
        assert received.synchronize() == (0, received.info.tag, size, b"")
        assert sent.synchronize() is None and sent.done() and received.done()
        assert numpy.array_equal(into, pattern(0, size, size))


def test_a_message_comes_after_earlier_work_of_its_stream(alone, stream, gate):
    channel = mpgpu.Channel(alone, 0)
    out, into = (mpgpu.empty(1000, device=0, shared=True) for _ in range(2))
    out.numpy()[:], into.numpy()[:] = 1, 0
    written = mpgpu.empty(1000, device=0)
    written.numpy()[:] = 2
    mpgpu.Plan([(out, written)]).execute(stream)
    sent = channel.send(out, stream)
    received = channel.receive(into)
    assert not sent.done() and not received.done()
    gate.open()
    received.synchronize()
    sent.synchronize()
    assert (into.numpy() == 2).all()


def test_a_stream_waits_for_a_message_and_the_host_does_not(alone, stream):
    channel = mpgpu.Channel(alone, 0)
    out, into, after = (mpgpu.empty(1000, device=0, shared=True) for _ in range(3))
    out.numpy()[:], into.numpy()[:] = 5, 0
    received = channel.receive(into, stream)
    received.wait(stream)
    copied = mpgpu.Plan([(after, into)]).execute(stream)
    assert not copied.done()
    channel.send(out).synchronize()
    copied.synchronize()
    assert (after.numpy() == 5).all()
    received.synchronize()
    received.wait(stream)


def test_memory_is_held_while_a_message_is_under_way(alone, stream, gate):
    channel = mpgpu.Channel(alone, 0)
    out, into = numpy.full(LARGE, 3, dtype=numpy.uint8), numpy.zeros(LARGE, dtype=numpy.uint8)
    gone = weakref.ref(out)
    sent = channel.send(out, stream)
    del out
    gc.collect()
    assert gone() is not None
    received = channel.receive(into)
    # The request is dropped, but the library keeps it alive until the send has ended.
    del sent
    gc.collect()
    assert gone() is not None
    gate.open()
    received.synchronize()
    assert (into == 3).all()
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        channel.send(b"x")
        channel.receive(bytearray(1)).synchronize()
        gc.collect()
    assert gone() is None


def test_a_failed_wait_holds_nothing_and_raises_an_error_of_its_own_each_time(alone):
    gc.disable()
    try:

        def fails():
            """Makes a wait fail in a separate stack frame, so that its objects are dropped afterwards."""
            into = numpy.zeros(1, dtype=numpy.uint8)
            gone, received, errors = weakref.ref(into), mpgpu.Channel(alone, 0).receive(into), []
            received.cancel()
            del into
            for ended in (received.synchronize, received.synchronize, received.done):
                with pytest.raises(mpgpu.Cancelled) as caught:
                    ended()
                errors.append(caught.value)
            return gone, errors, [len(traceback.extract_tb(error.__traceback__)) for error in errors[:2]]

        gone, errors, lengths = fails()
        assert len({id(error) for error in errors}) == 3 and lengths[0] == lengths[1]
        assert {(str(error), error.status) for error in errors} == {(str(errors[0]), "MP_ERROR_CANCELLED")}
        del errors
        assert gone() is None
    finally:
        gc.enable()


def test_what_a_task_awaits_goes_with_its_loop(alone):
    channel = mpgpu.Channel(alone, 0)
    into = numpy.zeros(4, dtype=numpy.uint8)
    gone = weakref.ref(into)

    async def waits(into):
        await channel.receive(into)

    async def leaves_it(into):
        # The task waits for so long that the library must notify it by a callback.
        task = asyncio.ensure_future(waits(into))
        await asyncio.sleep(0.02)
        return task

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    task = loop.run_until_complete(leaves_it(into))
    loop.close()
    del loop, task, into
    gc.collect()
    after = bytearray(4)
    channel.send(b"abcd")
    received, until = channel.receive(after), time.monotonic() + 10
    while not received.done() and time.monotonic() < until:
        time.sleep(0.001)
    assert gone() is None and after == b"abcd"


def test_ranks_that_are_threads_make_their_first_channels_together():
    meeting, own, received = threading.Barrier(2), [b"", b""], [b"", b""]

    def rank(number):
        def allgather(mine):
            own[number] = mine
            meeting.wait(15)
            gathered = list(own)
            meeting.wait(15)
            return gathered

        node = mpgpu.Node(rank=number, ranks=2, allgather=allgather, context=mpgpu.Context("host"))
        channel, into = mpgpu.Channel(node, 1 - number), bytearray(1)
        sent = channel.send(bytes([number]))
        channel.receive(into).synchronize()
        sent.synchronize()
        received[number] = bytes(into)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert received == [b"\1", b"\0"]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_what_a_child_has_sent_arrives_however_it_was_started(method, tmp_path):
    """Tests a child process that refers to node and channel in any way. The program has only one thread, because it calls fork."""
    (tmp_path / "program.py").write_text("""
import multiprocessing, sys, time

def run(rank, folder, pipe):
    global kept
    import mpgpu, numpy

    def gather(own):
        pipe.send_bytes(own)
        other = pipe.recv_bytes()
        return [own, other] if rank == 0 else [other, own]

    node = mpgpu.Node(rank=rank, ranks=2, allgather=gather)
    channel = mpgpu.Channel(node, 1 - rank)
    kept = node, channel
    bytes_ = numpy.zeros(100000, numpy.uint8)
    if rank == 0:
        bytes_[:] = 5
        channel.send(bytes_).synchronize()
    else:
        time.sleep(0.5)
        channel.receive(bytes_).synchronize()
        sys.exit(0 if (bytes_ == 5).all() else 1)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    processes = [context.Process(target=run, args=(rank, sys.argv[2], end)) for rank, end in enumerate(context.Pipe())]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    sys.exit(max(process.exitcode != 0 for process in processes))
""")
    program = [sys.executable, str(tmp_path / "program.py"), method, str(tmp_path)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_dropped_receive_takes_no_message(alone):
    channel = mpgpu.Channel(alone, 0)
    first, second = numpy.zeros(4, dtype=numpy.uint8), numpy.zeros(4, dtype=numpy.uint8)
    channel.receive(first)
    gc.collect()
    channel.send(b"abcd")
    channel.receive(second).synchronize()
    assert not first.any() and bytes(second) == b"abcd"


def test_an_await_in_debug_mode_and_in_a_second_loop(alone):
    channel = mpgpu.Channel(alone, 0)
    into = bytearray(4)

    async def once():
        received = asyncio.ensure_future(waits_for(channel.receive(into)))
        await asyncio.sleep(0.01)
        await channel.send(b"abcd")
        return await received

    for debug in (True, False, True):
        assert asyncio.run(once(), debug=debug).bytes == 4


def test_several_tasks_may_await_one_message(alone):
    channel = mpgpu.Channel(alone, 0)

    async def all_of_them():
        message = channel.receive(bytearray(4))
        tasks = [asyncio.ensure_future(waits_for(message)) for _ in range(3)]
        await asyncio.sleep(0.01)
        await channel.send(b"abcd")
        return await asyncio.gather(*tasks)

    assert [found.bytes for found in asyncio.run(all_of_them())] == [4, 4, 4]


def test_asking_tells_of_every_end(alone):
    messenger = mpgpu.Messenger(alone)
    into = bytearray(4)
    for number in range(300):
        message = messenger.receive(into)
        assert not message.done() and message.info is None
        messenger.send(b"abcd"[: number % 5], 0, number, metadata=b"xyz"[: number % 4])
        while not message.done():
            pass
        assert message.info == (0, number, number % 5, b"xyz"[: number % 4])
    cancelled, dropped = messenger.receive(into), messenger.receive(into)
    assert not cancelled.done() and not dropped.done()
    assert cancelled.cancel()
    with pytest.raises(mpgpu.Cancelled):
        while not cancelled.done():
            pass
    assert cancelled.info is None
    del dropped
    gc.collect()
    messenger.send(bytes(5), 0)
    message = messenger.receive(into)
    with pytest.raises(mpgpu.MessageTruncated) as caught:
        while not message.done():
            pass
    assert caught.value.bytes == 5


def test_tasks_of_two_event_loops_may_await_one_message(alone):
    channel = mpgpu.Channel(alone, 0)
    message = channel.receive(bytearray(4))
    sizes = []

    def run():
        sizes.append(asyncio.run(waits_for(message)).bytes)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    # Long enough for both to be called instead of polling.
    time.sleep(0.05)
    channel.send(b"abcd").synchronize()
    for thread in threads:
        thread.join(60)
    assert sizes == [4, 4]


def test_a_cancelled_send_is_not_received(alone):
    channel = mpgpu.Channel(alone, 0)
    first, second, into = (mpgpu.empty(5000, device=0, shared=True) for _ in range(3))
    first.numpy()[:], second.numpy()[:] = 1, 2

    async def both():
        task = asyncio.ensure_future(waits_for(channel.send(first)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        sent = channel.send(second)
        await channel.receive(into)
        await sent

    asyncio.run(both())
    assert (into.numpy() == 2).all()


def test_a_child_of_fork_ends_at_once_with_a_message_awaited(alone):
    channel = mpgpu.Channel(alone, 0)

    async def forks():
        task = asyncio.ensure_future(waits_for(channel.receive(bytearray(4))))
        await asyncio.sleep(0.05)
        child = os.fork()
        if child == 0:
            from mpgpu._loop import all_called

            started = time.monotonic()
            all_called()
            os._exit(0 if time.monotonic() - started < 5 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        await channel.send(b"abcd")
        assert (await task).bytes == 4

    with warnings.catch_warnings():
        # A warning of Python 3.12 that a process with threads forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.run(forks())


def test_too_many_messages_are_refused_and_nothing_is_lost(alone):
    messenger = mpgpu.Messenger(alone, operations=64, messages=8)
    for number in range(8):
        messenger.send(bytes([number]), 0)
    with pytest.raises(mpgpu.QueueFull, match="8 messages of this rank wait for receives of rank 0"):
        messenger.send(b"x", 0)
    into = bytearray(1)
    for number in range(8):
        messenger.receive(into).synchronize()
        assert into[0] == number
    few = mpgpu.Messenger(alone, operations=2)
    receives = [few.receive(bytearray(1)) for _ in range(2)]
    with pytest.raises(mpgpu.QueueFull, match="2 receives of this rank have not completed"):
        few.receive(into)
    assert receives[0].cancel()
    is_cancelled(receives[0])
    few.send(b"y", 0).synchronize()
    receives[1].synchronize()


def test_what_is_no_message_is_refused(alone):
    messenger = mpgpu.Messenger(alone)
    channel = mpgpu.Channel(messenger, 0)
    for call, kind, text in [
        (lambda: mpgpu.Channel(messenger, 1), mpgpu.ArgumentError, "rank=1: must be below 1, the number of ranks"),
        (lambda: mpgpu.Channel(alone, -1), mpgpu.ArgumentError, "rank=-1"),
        (lambda: messenger.send(b"x", 1), mpgpu.ArgumentError, "rank=1"),
        (lambda: messenger.send(b"x", -1), mpgpu.ArgumentError, "rank=-1: must be from 0"),
        (lambda: messenger.receive(bytearray(1), -2), mpgpu.ArgumentError, "rank=-2: must be from 0"),
        (lambda: messenger.send(b"x", 0, 1 << 63), mpgpu.ArgumentError, "tag="),
        (lambda: messenger.send(b"x", 0, metadata=bytes(257)), mpgpu.ArgumentError, "metadata_bytes=257: must be at most 256"),
        (lambda: messenger.receive(bytearray(1), 0, -2), mpgpu.ArgumentError, "tag=-2"),
        (lambda: channel.receive(b"x"), mpgpu.ArgumentError, "x is read-only"),
        (lambda: channel.send(numpy.zeros((4, 4))[:, 1]), mpgpu.ArgumentError, "not contiguous"),
        (lambda: channel.send(5), TypeError, "x is a int"),
        (lambda: channel.send(b"x", "stream"), TypeError, "stream is a str"),
        (lambda: channel.send(mpgpu.Context("host").empty(4)), mpgpu.ArgumentError, "another context"),
        (lambda: mpgpu.Messenger(alone, operations=-1), mpgpu.ArgumentError, "operations=-1"),
    ]:
        with pytest.raises(kind, match=text):
            call()
    # Nothing was posted.
    assert messenger.probe() is None


def test_a_messenger_that_goes_ends_what_waits(alone):
    messenger = mpgpu.Messenger(alone)
    channel = mpgpu.Channel(messenger, 0)
    message = channel.receive(bytearray(4))
    gone = weakref.ref(messenger)
    del messenger, channel
    gc.collect()
    # A message keeps its messenger alive.
    assert gone() is not None
    assert message.cancel()
    with pytest.raises(mpgpu.Cancelled):
        message.synchronize()
    gc.collect()
    assert gone() is None


def test_a_process_ends_with_messages_under_way(tmp_path):
    import subprocess
    import sys

    program = """
import asyncio, mpgpu
node = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own])
channel = mpgpu.Channel(node, 0)
received = channel.receive(bytearray(4))
async def wait_a_little():
    for message in (received, channel.receive(bytearray(4))):
        asyncio.ensure_future(waits(message))
    await asyncio.sleep(0.05)
async def waits(message):
    try:
        await message
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        raise
asyncio.run(wait_a_little())
third = channel.receive(bytearray(4))
print("end")
"""
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
    assert time.monotonic() - started < 9
