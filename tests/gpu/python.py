#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the Python package on the GPUs of this machine, with torch and CuPy if they are installed. Requires no pytest, no compiler and
no network.

    python3 tests/gpu/python.py WHEEL...

WHEEL is the wheel of mpgpu, followed by the wheels of packages that this Python lacks (cffi). Without a wheel, the installed mpgpu is
tested. The wheels are installed into a temporary folder. Tests are skipped with a message if they require two GPUs or a framework that is
missing. The last line is the summary. Exits with 0 on success, with 1 if there was an error, and with 77 if there is no GPU.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

TESTS: list[Callable[[], None]] = []
MIB = 2**20


class Skipped(Exception):
    """Raised by a test to skip itself, because a requirement is missing."""


def test(function: Callable[[], None]) -> Callable[[], None]:
    TESTS.append(function)
    return function


def need_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise Skipped("torch is not installed") from None
    if not torch.cuda.is_available():
        raise Skipped("this torch sees no GPU")
    return torch


def need_cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise Skipped("CuPy is not installed") from None
    return cupy


def need_gpus(count: int) -> None:
    import mpgpu

    if mpgpu.default_context().gpus < count:
        raise Skipped(f"fewer than {count} GPUs")


@contextlib.contextmanager
def refused(kind: type[BaseException], text: str) -> Any:
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} was not raised: {text}")


def random(torch: Any, count: int, seed: int, device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(device)


@test
def random_batches_of_tensors_arrive_and_no_other_byte_is_touched() -> None:
    torch = need_torch()
    import random as numbers

    import mpgpu
    import mpgpu.torch

    numbers.seed(1)
    gpus = mpgpu.default_context().gpus
    places = ["cpu", "pinned", "mpgpu", *(f"cuda:{gpu}" for gpu in range(gpus))]

    def place(tensor: Any, where: str) -> Any:
        if where == "mpgpu":
            return mpgpu.torch.pin(tensor)
        return tensor.pin_memory() if where == "pinned" else tensor.to(where)

    for number in range(40):
        pairs, expected = [], []
        for index in range(numbers.randint(1, 12)):
            count = numbers.choice([0, 1, 7, 4096, numbers.randint(1, 64 * MIB) // 2 ** numbers.randint(0, 12)])
            before, after, offset = numbers.randint(0, 40), numbers.randint(0, 40), numbers.randint(0, 40)
            dst = place(random(torch, before + count + after, 1000 * number + 2 * index), numbers.choice(places))
            src = place(random(torch, offset + count, 1000 * number + 2 * index + 1), numbers.choice(places))
            pairs.append((dst[before : before + count], src[offset:]))
            wanted = dst.cpu().clone()
            wanted[before : before + count] = src.cpu()[offset:]
            expected.append((dst, wanted))
        engine = numbers.choice([None, "stream", "graph"])
        plan = mpgpu.Plan(pairs, engine=engine)
        for _ in range(2):
            plan.execute().synchronize()
            for dst, wanted in expected:
                assert torch.equal(dst.cpu(), wanted), (number, engine)


@test
def copies_come_after_earlier_and_before_later_work_of_the_current_stream() -> None:
    torch = need_torch()
    import mpgpu

    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            src, dst = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda"), torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
            plan = mpgpu.Plan([(dst, src)])
            for value in range(1, 20):
                torch.cuda._sleep(2_000_000)
                src.fill_(value)
                request = mpgpu.copy(dst, src) if value % 2 else plan.execute()
                seen = dst.clone()
                src.fill_(255)
                assert bool((seen == value).all()), value
                request.synchronize()
                assert request.done()


@test
def each_gpu_s_default_stream_is_meant_whichever_gpu_is_current() -> None:
    torch = need_torch()
    need_gpus(2)
    import mpgpu

    torch.cuda.set_device(0)
    src, dst = (torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda:1") for _ in range(2))
    plan = mpgpu.Plan([(dst, src)])
    for stream in (None, torch.cuda.default_stream(1)):
        with torch.cuda.device(1):
            torch.cuda._sleep(200_000_000)
            src.fill_(7)
        plan.execute(stream)
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(1):
            seen = dst.clone()
        assert bool((seen == 7).all())
        with torch.cuda.device(1):
            src.fill_(0)
            dst.fill_(0)


@test
def a_plan_of_two_gpus_is_ordered_with_the_current_streams_of_both() -> None:
    torch = need_torch()
    need_gpus(2)
    import mpgpu

    one, other = (torch.zeros(8 * MIB, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in (0, 1))
    back = torch.zeros_like(one)
    there, again = mpgpu.Plan([(other, one)]), mpgpu.Plan([(back, other)])
    streams = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    for use_default in (True, False):
        contexts = contextlib.ExitStack()
        with contexts:
            if not use_default:
                for stream in streams:
                    contexts.enter_context(torch.cuda.stream(stream))
                torch.cuda.synchronize(0)
                torch.cuda.synchronize(1)
            for value in range(1, 10):
                with torch.cuda.device(0):
                    torch.cuda._sleep(5_000_000)
                    one.fill_(value)
                there.execute()
                with torch.cuda.device(1):
                    torch.cuda._sleep(5_000_000)
                    other.add_(1)
                again.execute()
                one.fill_(0)
                with torch.cuda.device(0):
                    seen = back.clone()
                assert bool((seen == value + 1).all()), (use_default, value)


@test
def host_memory_may_be_used_when_a_copy_returns() -> None:
    torch = need_torch()
    import mpgpu

    on_gpu = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    for host in (torch.empty(16 * MIB, dtype=torch.uint8), torch.empty(16 * MIB, dtype=torch.uint8).pin_memory()):
        for value in (1, 2, 3):
            torch.cuda._sleep(5_000_000)
            on_gpu.fill_(value)
            assert mpgpu.copy(host, on_gpu).done()
            assert bool((host == value).all())
            host.fill_(value + 10)
            mpgpu.copy(on_gpu, host)
            host.fill_(0)
            assert bool((on_gpu == value + 10).all())


@test
def blocks_are_copied_by_index_lists_on_the_host_and_on_the_gpu() -> None:
    torch = need_torch()
    import mpgpu

    on_gpu = [random(torch, 64 * 4096, layer, "cuda").view(64, 4096) for layer in range(3)]
    on_host = [torch.zeros(100, 4096, dtype=torch.uint8).pin_memory() for _ in on_gpu]
    stream = torch.cuda.Stream()
    for dtype in (torch.int32, torch.int64):
        for device in ("cpu", "cuda"):
            to, of = (torch.randperm(64)[:20].to(device, dtype) for _ in range(2))
            torch.cuda.synchronize()
            for given in (None, stream):
                before = [each.clone() for each in on_host]
                request = mpgpu.copy_blocks(on_host, on_gpu, to, of, stream=given, multiprocessors=2)
                request.synchronize()
                for place, layer, wanted in zip(on_host, on_gpu, before):
                    wanted[to.cpu().long()] = layer.cpu()[of.cpu().long()]
                    assert torch.equal(place, wanted), (dtype, device, given)
                before = [each.cpu() for each in on_gpu]
                mpgpu.copy_blocks(on_gpu, on_host, of, to, stream=given).synchronize()
                for layer, wanted in zip(on_gpu, before):
                    assert torch.equal(layer.cpu(), wanted), (dtype, device, given)
    with refused(mpgpu.ArgumentError, "dst_index[1]=-2: must not be negative"):
        mpgpu.copy_blocks(on_host, on_gpu, [0, -2], [0, 1])
    late = mpgpu.copy_blocks(on_host, on_gpu, torch.tensor([0, 100], device="cuda"), [0, 1])
    with refused(mpgpu.ArgumentError, "index 1 of the destination is 100"):
        late.synchronize()
    with refused(mpgpu.ArgumentError, "pageable"):
        mpgpu.copy_blocks(torch.zeros(64, 4096, dtype=torch.uint8), on_gpu[0])


@test
def copies_of_blocks_run_in_the_order_of_the_current_stream() -> None:
    torch = need_torch()
    import mpgpu

    src, dst = torch.zeros(256, 4096, device="cuda"), torch.zeros(256, 4096, device="cuda")
    index = torch.arange(255, -1, -1, device="cuda")
    for value in range(1, 20):
        torch.cuda._sleep(2_000_000)
        src.fill_(value)
        mpgpu.copy_blocks(dst, src, index)
        seen = dst.clone()
        src.fill_(-1)
        assert bool((seen == value).all()), value


@test
def tensors_live_until_the_copy_that_nobody_holds_is_done() -> None:
    torch = need_torch()
    import mpgpu

    dst = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    src = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    # torch does not know that this stream uses the memory.
    mpgpu.Plan([(dst, src)]).execute(stream)
    del src
    gc.collect()
    others = [torch.full((64 * MIB,), 9, dtype=torch.uint8, device="cuda") for _ in range(4)]
    stream.synchronize()
    assert bool((dst == 7).all()), "memory was given out again while it was copied"
    assert len(others) == 4


@test
def tensors_that_are_not_contiguous_are_made_so_before_a_stream_that_is_given_reads_them() -> None:
    torch = need_torch()
    import mpgpu.torch

    src = random(torch, 4096 * 4096, 1, "cuda").view(4096, 4096).t()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    moved = mpgpu.torch.to({"x": src}, "cuda", stream)
    stream.synchronize()
    assert torch.equal(moved["x"], src)


@test
def a_tensor_that_is_given_other_memory_keeps_its_first_while_a_plan_has_it() -> None:
    torch = need_torch()
    import mpgpu

    parameter = torch.nn.Parameter(torch.full((MIB,), 1.0, device="cuda"))
    dst = torch.zeros(MIB, device="cuda")
    plan = mpgpu.Plan([(dst, parameter)])
    parameter.data = torch.full((MIB,), 2.0, device="cuda")
    torch.full((MIB,), 3.0, device="cuda")
    plan.execute().synchronize()
    assert bool((dst == 1).all())


@test
def streams_of_every_kind_are_taken() -> None:
    torch = need_torch()
    import mpgpu

    src, dst = random(torch, MIB, 1, "cuda"), torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    plan = mpgpu.Plan([(dst, src)])
    torch.cuda.synchronize()
    stream, own = torch.cuda.Stream(), mpgpu.Stream(0)
    streams = [None, 0, stream, stream.cuda_stream, own, int(own), torch.cuda.default_stream(), torch.cuda.ExternalStream(int(own))]
    with contextlib.suppress(Skipped):
        cupy = need_cupy()
        streams += [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null, cupy.cuda.ExternalStream(stream.cuda_stream)]
    for each in streams:
        dst.zero_()
        torch.cuda.synchronize()
        plan.prepare(each)
        plan.execute(each).synchronize()
        assert torch.equal(src, dst), each


@test
def a_captured_plan_is_executed_by_every_replay() -> None:
    torch = need_torch()
    import mpgpu

    src, dst = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda"), torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    plan = mpgpu.Plan([(dst, src)])
    plan.execute().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        src.add_(1)
        plan.execute()
    for value in range(1, 5):
        graph.replay()
        assert bool((dst == value).all())


@test
def buffers_are_tensors_and_arrays_without_a_copy() -> None:
    import mpgpu

    context = mpgpu.default_context()
    assert context.backend == "cuda"
    buffer, host = mpgpu.empty((16, 1024), "float32", device=0), mpgpu.empty((16, 1024), "float32")
    assert not hasattr(buffer, "__array_interface__")
    with refused(AttributeError, "is not accessible to the CPU"):
        buffer.numpy()
    host.numpy()[:] = 3
    mpgpu.copy(buffer, host)
    checked = 0
    with contextlib.suppress(Skipped):
        torch = need_torch()
        tensor = torch.as_tensor(buffer, device="cuda:0")
        assert tensor.data_ptr() == buffer.address
        assert tensor.shape == (16, 1024)
        assert bool((tensor == 3).all())
        assert torch.from_dlpack(buffer).data_ptr() == buffer.address
        checked += 1
    with contextlib.suppress(Skipped):
        cupy = need_cupy()
        array = cupy.asarray(buffer)
        assert array.data.ptr == buffer.address
        assert bool((array == 3).all())
        del buffer
        gc.collect()
        assert bool((array == 3).all())
        checked += 1
    if not checked:
        raise Skipped("neither torch nor CuPy is installed")


@test
def arrays_of_cupy_are_copied_in_its_current_stream() -> None:
    cupy = need_cupy()
    import mpgpu

    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        src, dst = cupy.zeros(16 * MIB, cupy.uint8), cupy.zeros(16 * MIB, cupy.uint8)
        plan = mpgpu.Plan([(dst, src)])
        for value in range(1, 20):
            src[:] = value
            plan.execute()
            seen = dst.copy()
            src[:] = 0
            assert bool((seen == value).all())
        with refused(ValueError, "is not contiguous"):
            mpgpu.copy(dst[::2], src[::2])


class Interface:
    """Array that supports only `__cuda_array_interface__`."""

    def __init__(self, owner: Any, stream: int | None) -> None:
        self.owner, self.__cuda_array_interface__ = owner, {**owner.__cuda_array_interface__, "stream": stream}


class Dlpack:
    """Array that supports only DLPack."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __dlpack_device__(self) -> Any:
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.owner.__dlpack__(**arguments)


@test
def what_a_producer_still_computes_is_waited_for() -> None:
    torch = need_torch()
    import mpgpu

    dst = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    for value, wrap in enumerate([lambda x, s: Interface(x, s.cuda_stream), lambda x, s: Dlpack(x)], 1):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            src = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(100_000_000)
            src.fill_(value)
            plan = mpgpu.Plan([(Interface(dst, None), wrap(src, stream))])
        own = mpgpu.Stream(0)
        plan.execute(own).synchronize()
        assert bool((dst == value).all())


@test
def jax_arrays_are_read_and_never_written() -> None:
    try:
        import jax
    except ImportError:
        raise Skipped("JAX is not installed") from None
    import mpgpu

    array = jax.numpy.arange(1 << 20, dtype=jax.numpy.int32) * 3
    host = mpgpu.empty(1 << 20, "int32")
    mpgpu.copy(host, array)
    assert (host.numpy() == jax.device_get(array)).all()
    with refused(ValueError, "is read-only"):
        mpgpu.copy(array, host)


@test
def tensors_without_plain_memory_are_refused() -> None:
    torch = need_torch()
    import mpgpu

    plain = torch.zeros(4, 4, device="cuda")
    with refused(ValueError, "copy x.contiguous() instead"):
        mpgpu.copy(plain, plain.clone().t())
    with refused(ValueError, "resolve_conj"):
        mpgpu.copy(torch.zeros(4, dtype=torch.complex64, device="cuda"), torch.zeros(4, dtype=torch.complex64, device="cuda").conj())
    with refused(ValueError, "tensor of layout torch.sparse_coo"):
        mpgpu.copy(plain, plain.to_sparse())
    with refused(ValueError, "a tensor on meta"):
        mpgpu.copy(plain, plain.to("meta"))
    with refused(ValueError, "they must have the same size"):
        mpgpu.copy(plain, plain[:2])
    host = mpgpu.Context("host")
    with refused(ValueError, "the context runs on the host backend"):
        mpgpu.copy(plain, plain.clone(), context=host)


@test
def a_plan_whose_tensor_lost_its_memory_is_refused() -> None:
    torch = need_torch()
    import mpgpu

    dst = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    src = torch.full((16 * MIB,), 9, dtype=torch.uint8, device="cuda")
    plan, before = mpgpu.Plan([(dst, src)]), dst.data_ptr()
    plan.execute().synchronize()
    # FSDP resizes storages in this way.
    dst.untyped_storage().resize_(0)
    others = [torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert before in [other.data_ptr() for other in others], "torch gave its memory to none of them"
    for stream in (None, torch.cuda.Stream()):
        with refused(ValueError, "dst of transfer 0: the storage of the tensor had 16777216 bytes"):
            plan.execute(stream)
    dst.untyped_storage().resize_(16 * MIB)
    with refused(ValueError, "plan again while the tensor has memory"):
        plan.execute()
    mpgpu.Plan([(dst, src)]).execute().synchronize()
    assert bool((dst == 9).all()) and not any(bool(other.any()) for other in others)


@test
def a_state_dict_is_moved_as_one_batch() -> None:
    torch = need_torch()
    import mpgpu
    import mpgpu.torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 10))
    model[2].weight.data = model[2].weight.data.half()
    state = model.state_dict()
    state["tied"] = state["0.weight"]
    state["extra"] = {"empty": torch.empty(0, 5), "number": 7, "list": [torch.arange(3), (torch.ones(2, 2).t(),)]}
    pinned = mpgpu.torch.pin(state)
    assert all(tensor.is_pinned() for tensor in pinned.values() if isinstance(tensor, torch.Tensor))
    assert pinned["tied"].data_ptr() == pinned["0.weight"].data_ptr()
    executions = mpgpu.default_context().statistics().executions
    for stream in (None, torch.cuda.Stream()):
        moved = mpgpu.torch.to(pinned, "cuda:0", stream)
        torch.cuda.synchronize()
        assert type(moved) is type(state)
        assert moved._metadata == state._metadata
        assert moved["tied"].data_ptr() == moved["0.weight"].data_ptr()
        assert moved["extra"]["number"] == 7
        assert moved["extra"]["empty"].shape == (0, 5)
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert moved[name].device == torch.device("cuda:0")
                assert moved[name].dtype == tensor.dtype
                assert torch.equal(moved[name].cpu(), tensor), name
        assert torch.equal(moved["extra"]["list"][1][0].cpu(), torch.ones(2, 2))
    assert mpgpu.default_context().statistics().executions == executions + 2
    back = mpgpu.torch.empty_like(moved)
    mpgpu.torch.copy(back, moved)
    assert torch.equal(back["0.weight"], state["0.weight"])
    with refused(ValueError, "['0.bias']: dst is (500,) of torch.float32 and src (3,) of torch.float32"):
        mpgpu.torch.copy({"0.bias": torch.zeros(500)}, {"0.bias": torch.zeros(3)})
    with refused(ValueError, "only one of dst and src has 'b'"):
        mpgpu.torch.copy({"a": torch.zeros(5)}, {"a": torch.zeros(5), "b": 1})
    plain = mpgpu.torch.empty((3, 5), torch.bfloat16)
    assert (plain.shape, plain.dtype, plain.is_pinned()) == ((3, 5), torch.bfloat16, True)


@test
def threads_copy_at_once_and_every_byte_arrives() -> None:
    torch = need_torch()
    import mpgpu

    gpus = mpgpu.default_context().gpus
    failed: list[str] = []

    def work(number: int) -> None:
        try:
            stream = torch.cuda.Stream(number % gpus)
            with torch.cuda.stream(stream):
                src = random(torch, 5 * MIB + number, number, f"cuda:{number % gpus}")
                dst = torch.zeros_like(src, device=f"cuda:{(number + 1) % gpus}")
                torch.cuda.synchronize(dst.device)
                plan = mpgpu.Plan([(dst, src)])
                for _ in range(50):
                    src.add_(1)
                    plan.execute(stream)
                    assert plan.execute(stream).synchronize() is None
                    assert torch.equal(src.cpu(), dst.cpu())
        except BaseException:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


def rank_of_a_node(rank: int, ranks: int, socket: str, answers: Any) -> None:
    try:
        import mpgpu
        import torch

        torch.cuda.set_device(rank)
        node = mpgpu.Node(rank=rank, ranks=ranks, socket=socket, devices=[rank])
        sent, received = (torch.zeros(32 * MIB, dtype=torch.uint8, device=f"cuda:{rank}") for _ in range(2))
        plan = node.plan([sent, received], [(((rank + 1) % ranks, 1), (rank, 0), 32 * MIB)])
        for value in range(1, 10):
            sent.fill_(10 * rank + value)
            plan.execute()
            seen = received.clone()
            assert bool((seen == 10 * ((rank - 1) % ranks) + value).all())
        torch.cuda.synchronize()
        del plan
        answers.put(None)
    except BaseException:
        answers.put(traceback.format_exc())


def start_ranks(rank_function: Callable[..., None], *arguments: Any) -> list[str]:
    """Runs two ranks in separate processes, and returns their results."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=rank_function, args=(rank, 2, f"{folder}/ranks", answers, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        said = [answers.get(timeout=180) for _ in ranks]
        for process in ranks:
            process.join(30)
    failed = [answer for answer in said if answer and answer.startswith("Traceback")]
    assert not failed, failed[0]
    return [answer for answer in said if answer]


@test
def ranks_that_plan_together_receive_every_byte_of_every_step() -> None:
    need_torch()
    need_gpus(2)
    start_ranks(rank_of_a_node)


def rank_with_channels(rank: int, ranks: int, socket: str, answers: Any, gpus: int) -> None:
    """Exchanges tensors of many sizes and in every kind of memory with the other rank, after and before work of torch."""
    try:
        # Each process sees only its own GPU, as if a job scheduler had set the variable.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[rank % gpus]
        import asyncio
        import time

        import mpgpu
        import mpgpu.torch
        import torch

        node = mpgpu.Node(rank=rank, ranks=ranks, socket=socket, devices=[0])
        channel = mpgpu.Channel(node, 1 - rank)
        kinds: list[Callable[[int], Any]] = [
            lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda"),
            lambda size: torch.zeros(size, dtype=torch.uint8),
            lambda size: torch.zeros(size, dtype=torch.uint8).pin_memory(),
            lambda size: mpgpu.torch.pin(torch.zeros(size, dtype=torch.uint8)),
        ]

        async def exchange(number: int, size: int) -> None:
            sent, received = kinds[number % 4](size), kinds[number // 4 % 4](size + 3)
            if sent.is_cuda:
                # The message is posted before its data has been written.
                torch.cuda._sleep(2_000_000)
            sent.copy_(random(torch, size, 2 * number + rank))
            message = channel.receive(received)
            await asyncio.gather(channel.send(sent), message)
            assert message.info is not None and message.info.bytes == size
            assert torch.equal(received.cpu()[:size], random(torch, size, 2 * number + 1 - rank)), (number, size)
            assert not received.cpu()[size:].any()

        async def all_sizes() -> None:
            for number in range(48):
                await exchange(number, [1, 8, 1000, 4096, 100_001, MIB, 5 * MIB + 1, 48 * MIB][number % 8] + number // 16)

        asyncio.run(all_sizes())

        # The order of the stream is sufficient: the host does not wait before the end.
        sent, received = kinds[0](MIB), kinds[0](MIB)
        seen, messages = [], []
        for value in range(1, 30):
            torch.cuda._sleep(100_000)
            sent.fill_(value + 100 * rank)
            posted = [channel.receive(received), channel.send(sent)]
            for message in posted:
                message.wait()
            seen.append(received.clone())
            messages += posted
        for message in messages:
            message.synchronize()
        for value, tensor in enumerate(seen, 1):
            assert bool((tensor == value + 100 * (1 - rank)).all()), value

        ball = kinds[0](4096)

        async def play(rounds: int) -> float:
            started = time.perf_counter()
            for _ in range(rounds):
                for turn in (0, 1):
                    await (channel.send(ball) if turn == rank else channel.receive(ball))
            return (time.perf_counter() - started) / rounds / 2 * 1e6

        asyncio.run(play(200))
        one_way = sorted(asyncio.run(play(200)) for _ in range(9))[4]
        # No rank may exit while the other one still receives.
        for turn in (0, 1):
            (channel.send(b"x") if turn == rank else channel.receive(bytearray(1))).synchronize()
        answers.put(f"{one_way:.1f} us one way for 4 KiB by await" if rank == 0 else None)
    except BaseException:
        answers.put(traceback.format_exc())


@test
def channels_between_processes_that_share_a_gpu_carry_every_byte() -> None:
    need_torch()
    print(*start_ranks(rank_with_channels, 1))


@test
def channels_between_processes_with_a_gpu_each_carry_every_byte() -> None:
    need_torch()
    need_gpus(2)
    print(*start_ranks(rank_with_channels, 2))


def install(wheels: list[str]) -> None:
    """Adds the wheels to the module path of this process and of its children."""
    folder = tempfile.mkdtemp(prefix="mpgpu-python-")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder, *wheels], check=True)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH")) if part)


def main() -> int:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)
        return 0
    found = subprocess.run("nvidia-smi --list-gpus", shell=True, capture_output=True, text=True).stdout
    if not found.startswith("GPU "):
        print("gpu python: skipped: no NVIDIA GPU on this machine")
        return 77
    if sys.argv[1:]:
        install(sys.argv[1:])
    import mpgpu

    print(f"mpgpu {mpgpu.__version__}, {mpgpu.default_context()}")
    passed = failed = skipped = 0
    for function in TESTS:
        name = function.__name__.replace("_", " ")
        try:
            function()
        except Skipped as why:
            skipped += 1
            print(f"skipped: {name}: {why}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED: {name}\n{traceback.format_exc()}", flush=True)
        else:
            passed += 1
            print(f"passed: {name}", flush=True)
    print(f"gpu python: {passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
