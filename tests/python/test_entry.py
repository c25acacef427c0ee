# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests messages that call functions of their receiver, between processes and within one."""

from __future__ import annotations

import asyncio
import struct

import mpgpu
import numpy
import pytest
from test_messages import meet, node_of, others, pattern
from test_node import start

BAR = 0x700
SIZES = (1, 5000, 300_000)


def calls(rank, ranks, _, folder):
    """Calls a function of each other rank several times concurrently, with arguments and with buffers in GPU and host memory."""
    node = node_of(rank, ranks, folder)
    messenger = mpgpu.Messenger(node)
    entries = mpgpu.Entries(messenger)
    rounds = 5
    done = []

    @entries.on_message(BAR, mask=0xFF00)
    async def bar(message):
        assert message.sizes == SIZES and message.arguments == bytes([message.rank]) * 400
        grid = node.context.empty(SIZES[1], device=rank, shared=True)
        first, last = numpy.zeros(SIZES[0], numpy.uint8), numpy.zeros(SIZES[2], numpy.uint8)
        infos = await message.into(first, grid, last)
        assert len(infos) == 3
        for part, got in enumerate((first, grid.numpy(), last)):
            assert numpy.array_equal(got, pattern(message.rank, part, SIZES[part])), part
        done.append(message.tag)

    async def run():
        server = asyncio.create_task(entries.serve())
        parts = [pattern(rank, part, size) for part, size in enumerate(SIZES)]
        grid = node.context.empty(SIZES[1], device=rank, shared=True)
        grid.numpy()[:] = parts[1]
        parts[1] = grid
        sent = [entries.send(to, BAR + number, bytes([rank]) * 400, parts) for number in range(rounds) for to in range(ranks) if to != rank]
        for one in sent:
            await one
        while len(done) < rounds * (ranks - 1):
            assert not server.done(), server.result()
            await asyncio.sleep(0)
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)

    asyncio.run(run())
    assert sorted(done) == sorted(BAR + number for number in range(rounds) for _ in range(ranks - 1))
    meet(others(node))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_call_functions_of_each_other(ranks, tmp_path):
    start(ranks, calls, tmp_path)


@pytest.fixture
def messenger():
    return mpgpu.Messenger(mpgpu.Node(context=mpgpu.Context("host", topology="beluga"), rank=0, ranks=1, allgather=lambda own: [own]))


def test_messages_of_send_call_functions_too_in_order(messenger):
    entries, got = mpgpu.Entries(messenger), []

    @entries.on_message(3)
    async def three(message):
        x = numpy.zeros(sum(message.sizes), numpy.uint8)
        if message.sizes:
            await message.into(x)
        got.append((message.arguments, bytes(x)))

    async def run():
        server = asyncio.create_task(entries.serve())
        sent = [messenger.send(bytes([n]) * n, 0, 3, metadata=b"m%d" % n) for n in range(4)]
        await entries.send(0, 3, b"none")
        await entries.send(0, 3, b"one", [b"x" * 9])
        for one in sent:
            await one
        while len(got) < 6:
            assert not server.done(), server.result()
            await asyncio.sleep(0)
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)

    asyncio.run(run())
    assert sorted(got) == sorted([(b"m%d" % n, bytes([n]) * n) for n in range(4)] + [(b"none", b""), (b"one", b"x" * 9)])


@pytest.mark.parametrize("parts", [[b"x"], [b"x", b"y"]])
def test_what_a_function_raises_ends_the_server_and_parts_must_be_placed(messenger, parts):
    entries = mpgpu.Entries(messenger)

    @entries.on_message(3)
    async def three(message):
        with pytest.raises(mpgpu.ArgumentError, match=f"0 arrays: the message has {len(parts)} parts"):
            message.into()

    async def run():
        entries.send(0, 3, b"", parts)
        await asyncio.wait_for(entries.serve(), 20)

    with pytest.raises(mpgpu.ArgumentError, match=f"has not placed all {len(parts)} parts"):
        asyncio.run(run())


def test_what_says_that_it_is_a_head_and_is_none_is_refused(messenger):
    entries = mpgpu.Entries(messenger)

    @entries.on_message(3)
    async def three(message):
        raise AssertionError(message)

    async def run():
        messenger.send(b"x" * 10, 0, 3, metadata=struct.pack("=QII", 0x7972746E65706D00, 2, 0))
        await asyncio.wait_for(entries.serve(), 20)

    with pytest.raises(mpgpu.ArgumentError, match="rank 0, tag 3: 10 bytes are not the head"):
        asyncio.run(run())
