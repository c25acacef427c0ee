#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the cost of messages in Python, on the host backend or on GPUs: `python python/bench/messages.py [--gpu] [--most BYTES]`.

First, the cost of `Channel.send` beyond that of `mp_send`, measured as execute.py does for plans: in the same run, alternating, minus the
time that cffi takes for the same number of calls of an empty function; in microseconds of processor time of the calling thread.

Second, a ping-pong of 4 KiB between two processes: by the C functions, by threads that wait, and by tasks that await, with and without
receives that are posted ahead; in microseconds one way, medians and quartiles of rounds.

Third, latency and bandwidth by size, up to --most, as tests/gpu/messages measures them for C: channels from memory of one device to memory
of the other. For comparison, the same messages staged, as in programs whose message library does not support GPUs: the whole buffer is
copied into pinned host memory, sent from there, and copied to the receiver's device. Every byte is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Callable

import mpgpu
from mpgpu._library import NULL, ffi, lib

BATCHES, CALLS, ROUND_TRIPS, ROUNDS = 201, 50, 200, 31
WINDOW, MOST_AT_ONCE = 16, 1 << 30  # maximum number of messages in flight, and of their bytes


def print_readings(name: str, readings: list[float]) -> None:
    quartiles = statistics.quantiles(readings, n=4)
    print(f"{name:40} {statistics.median(readings):7.2f} us   quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f}", flush=True)


def calls(context: mpgpu.Context) -> None:
    node = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own], context=context)
    channel = mpgpu.Channel(node, 0)
    src, dst = context.empty(8, device=0, shared=True), context.empty(8, device=0, shared=True)
    stream = mpgpu.Stream(0, context=context)
    messenger, memory, tag = channel._messenger._handle, ffi.cast("void *", src.address), channel._tag
    requests = [[ffi.new("mp_request_t *") for _ in range(CALLS)] for _ in range(2)]

    def cffi_alone() -> list[Any]:
        return [lib.mp_version() for _ in range(CALLS)]

    def by_c() -> list[Any]:
        for request in requests[0]:
            lib.mp_send(messenger, memory, 8, 0, tag, NULL, 0, stream._handle, request)
        return requests[0]

    arrays: dict[str, Any] = {"mpgpu.Buffer": src}
    if context.backend == "host":
        arrays["NumPy"] = src.numpy()
    else:
        try:
            import torch

            arrays["torch"] = torch.as_tensor(src, device="cuda:0")
        except ImportError:
            pass
    cases: dict[str, Callable[[], list[Any]]] = {"cffi alone: mp_version": cffi_alone, "C: mp_send": by_c}
    for name, array in arrays.items():
        cases[f"channel.send({name}, stream)"] = lambda array=array: [channel.send(array, stream) for _ in range(CALLS)]
    readings: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(BATCHES):
        for name in random.sample(list(cases), len(cases)):
            # The receives are posted before and the waits come later, so that only the send is measured.
            for request in requests[1]:
                lib.mp_receive(messenger, ffi.cast("void *", dst.address), 8, 0, tag, 2**64 - 1, stream._handle, request)
            started = time.thread_time()
            sent = cases[name]()
            readings[name].append((time.thread_time() - started) / CALLS * 1e6)
            if name.startswith("cffi"):
                by_c()
            for each in requests[0] if not name.startswith("channel") else ():
                lib.mp_wait(each, NULL)
            for each in sent if name.startswith("channel") else ():
                each.synchronize()
            for request in requests[1]:
                assert lib.mp_wait(request, NULL) == 0
            stream.synchronize()
    for name, values in readings.items():
        print_readings(name, values)
    median = {name: statistics.median(values) for name, values in readings.items()}
    print()
    for name in cases:
        if name.startswith("channel"):
            print(f"{name:40} {median[name] - median['C: mp_send'] + median['cffi alone: mp_version']:7.2f} us beyond C")
    print(flush=True)


class Direct:
    """Messages between buffers of the devices."""

    def __init__(self, channel: mpgpu.Channel, stream: mpgpu.Stream, context: mpgpu.Context, device: int, size: int) -> None:
        self.channel, self.stream, self.context = channel, stream, context
        count = max(1, min(WINDOW, MOST_AT_ONCE // size))
        self.buffers = [context.empty(size, device=device, shared=True) for _ in range(count)]

    def send(self, index: int) -> mpgpu.Message:
        return self.channel.send(self.buffers[index % len(self.buffers)], self.stream)

    def receive(self, index: int) -> mpgpu.Receive:
        return self.channel.receive(self.buffers[index % len(self.buffers)], self.stream)

    def received(self, index: int, message: mpgpu.Receive) -> mpgpu.Request:
        """Returns the object to wait for once a message has been received."""
        return message

    def fill(self, number: int) -> None:
        for index, buffer in enumerate(self.buffers):
            mpgpu.copy(buffer, random.Random(number * WINDOW + index).randbytes(len(buffer)), context=self.context)

    def check(self, number: int) -> None:
        for index, buffer in enumerate(self.buffers):
            found = bytearray(len(buffer))
            mpgpu.copy(found, buffer, context=self.context)
            if found != random.Random(number * WINDOW + index).randbytes(len(buffer)):
                raise SystemExit(f"{type(self).__name__}, {len(buffer)} bytes, buffer {index}: received wrong")


class Staged(Direct):
    """Messages between buffers of the devices, staged through pinned host memory."""

    def __init__(self, channel: mpgpu.Channel, stream: mpgpu.Stream, context: mpgpu.Context, device: int, size: int) -> None:
        super().__init__(channel, stream, context, device, size)
        self.host = [context.empty(size, shared=True) for _ in self.buffers]
        pairs = list(zip(self.host, self.buffers))
        self.down = [mpgpu.Plan([(host, buffer)], max_paths=1) for host, buffer in pairs]
        self.up = [mpgpu.Plan([(buffer, host)], max_paths=1) for host, buffer in pairs]

    def send(self, index: int) -> mpgpu.Message:
        self.down[index % len(self.down)].execute(self.stream).synchronize()
        return self.channel.send(self.host[index % len(self.host)], self.stream)

    def receive(self, index: int) -> mpgpu.Receive:
        return self.channel.receive(self.host[index % len(self.host)], self.stream)

    def received(self, index: int, message: mpgpu.Receive) -> mpgpu.Request:
        message.synchronize()
        return self.up[index % len(self.up)].execute(self.stream)


def measure(rank: int, channel: mpgpu.Channel, way: Direct, size: int) -> tuple[float, float]:
    """Returns the median time of one message one way, in microseconds, and the median rate of windows, in 1e9 bytes per second."""
    latencies, rates = [], []
    if rank == 0:
        way.fill(0)
    trips = 200 if size <= 1 << 20 else 20
    for trip in range(trips + 10):
        started = time.perf_counter()
        for turn in (0, 1):
            if turn == rank:
                way.send(0).synchronize()
            else:
                way.received(0, way.receive(0)).synchronize()
        if trip >= 10:
            latencies.append((time.perf_counter() - started) / 2 * 1e6)
    windows = 40 if size <= 1 << 20 else 8
    for number in range(1, windows + 1):
        if rank == 0 and number in (1, windows):  # the last check covers the last write
            way.fill(number)
        answer = bytearray(1)
        if rank == 0:
            channel.receive(answer).synchronize()  # the other rank has posted its receives
            started = time.perf_counter()
            sent = [way.send(index) for index in range(WINDOW)]
            for message in sent:
                message.synchronize()
            channel.receive(answer).synchronize()
            rates.append(size * WINDOW / (time.perf_counter() - started) / 1e9)
        else:
            receives = [way.receive(index) for index in range(WINDOW)]
            channel.send(answer).synchronize()
            for request in [way.received(index, message) for index, message in enumerate(receives)]:
                request.synchronize()
            channel.send(answer).synchronize()
    if rank == 1:
        way.check(windows)
    return statistics.median(latencies), statistics.median(rates or [0.0])


def by_size(rank: int, channel: mpgpu.Channel, stream: mpgpu.Stream, context: mpgpu.Context, device: int, most: int) -> None:
    if rank == 0:
        print(f"\n{'':>10}  {'direct':>19}  {'staged':>19}  {'direct: times as fast':>22}")
        print(f"{'bytes':>10}  {'us':>10} {'GB/s':>8}  {'us':>10} {'GB/s':>8}  {'latency':>11} {'bandwidth':>10}")
    size = 8
    while size <= most:
        (latency, rate), (staged_latency, staged_rate) = (
            measure(rank, channel, way(channel, stream, context, device, size), size) for way in (Direct, Staged)
        )
        if rank == 0:
            times = f"{staged_latency / latency:11.1f} {rate / staged_rate:10.1f}"
            print(f"{size:10}  {latency:10.2f} {rate:8.2f}  {staged_latency:10.2f} {staged_rate:8.2f}  {times}", flush=True)
        size *= 8 if size < 1 << 16 else 4


Post = Callable[[], Any]
Order = Callable[[int, Post, Post], Iterator[Any]]


def in_turn(rank: int, send: Post, receive: Post) -> Iterator[Any]:
    """Yields the operations to wait for, each as soon as it is posted."""
    for turn in range(2 * ROUND_TRIPS):
        yield send() if turn % 2 == rank else receive()


def ahead(rank: int, send: Post, receive: Post) -> Iterator[Any]:
    """Yields the operations to wait for, with each receive posted while the previous message is in flight, as in tests/gpu/messages and
    UCX's tag_lat.
    """
    incoming = receive() if rank else None
    for trip in range(ROUND_TRIPS):
        if rank:
            yield incoming
        sent = send()
        if not rank or trip + 1 < ROUND_TRIPS:
            incoming = receive()
        yield sent
        if not rank:
            yield incoming


def ping_pong(rank: int, folder: str, gpu: bool, most: int) -> None:
    context = mpgpu.Context("cuda" if gpu else "host")
    device = rank % context.gpus
    node = mpgpu.Node(rank=rank, ranks=2, socket=os.path.join(folder, "ranks"), devices=[device], context=context)
    channel = mpgpu.Channel(node, 1 - rank)
    out, into = [context.empty(4096, device=device, shared=True) for _ in range(2)]
    stream = mpgpu.Stream(device, context=context)
    messenger, tag = channel._messenger._handle, channel._tag
    src, dst = [ffi.cast("void *", ball.address) for ball in (out, into)]
    sent, received = ffi.new("mp_request_t *"), ffi.new("mp_request_t *")

    def c_send() -> Any:
        lib.mp_send(messenger, src, 4096, 1 - rank, tag, NULL, 0, stream._handle, sent)
        return sent

    def c_receive() -> Any:
        lib.mp_receive(messenger, dst, 4096, 1 - rank, tag, 2**64 - 1, stream._handle, received)
        return received

    def send() -> mpgpu.Message:
        return channel.send(out, stream)

    def receive() -> mpgpu.Receive:
        return channel.receive(into, stream)

    def by_c(order: Order) -> None:
        for request in order(rank, c_send, c_receive):
            assert lib.mp_wait(request, NULL) == 0

    def by_wait(order: Order) -> None:
        for message in order(rank, send, receive):
            message.synchronize()

    async def by_await(order: Order) -> None:
        for message in order(rank, send, receive):
            await message

    loop = asyncio.new_event_loop()
    ways: dict[str, Callable[[Order], Any]] = {
        "C: mp_send, mp_receive, mp_wait": by_c,
        "channel, synchronize()": by_wait,
        "channel, await": lambda order: loop.run_until_complete(by_await(order)),
    }
    cases = {f"{name}{words}": (play, order) for order, words in ((ahead, ""), (in_turn, "; in turn")) for name, play in ways.items()}
    readings: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(ROUNDS + 1):
        for name, (play, order) in cases.items():
            started = time.perf_counter()
            play(order)
            if round_number:  # the first round is a warm-up
                readings[name].append((time.perf_counter() - started) / ROUND_TRIPS / 2 * 1e6)
    loop.close()
    if rank == 0:
        print(f"ping-pong of 4096 bytes between memory of device {device} and of the other process, one way; receives are posted ahead,")
        print("or, in turn, after the previous message has arrived:")
        for name, values in readings.items():
            print_readings(name, values)
    by_size(rank, channel, stream, context, device, most)
    if rank == 0:
        channel.receive(bytearray(1)).synchronize()
        print("every byte right\n", flush=True)
    else:
        channel.send(b"x").synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="on the CUDA backend instead of virtual devices")
    parser.add_argument("--most", type=int, help="bytes of the largest message; 64 MiB on GPUs and 1 MiB elsewhere, unless given")
    random.seed(1)
    arguments = parser.parse_args()
    gpu, most = arguments.gpu, arguments.most or (1 << 26 if arguments.gpu else 1 << 20)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        players = [spawn.Process(target=ping_pong, args=(rank, folder, gpu, most)) for rank in (0, 1)]
        for player in players:
            player.start()
        for player in players:
            player.join()
        if any(player.exitcode for player in players):
            raise SystemExit("a process has failed")
    calls(mpgpu.Context("cuda" if gpu else "host"))


if __name__ == "__main__":
    main()
