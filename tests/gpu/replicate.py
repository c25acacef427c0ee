#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures broadcasts to all GPUs: of a buffer and a model in host memory and, with three or more GPUs, of a buffer of GPU 0. Each
broadcast is made by one copy per GPU, and by mpgpu, where GPUs forward data to other GPUs. NCCL broadcasts from GPU 0 for comparison. Every
byte is compared. Requires torch with CUDA and two GPUs, but no compiler.

    python3 tests/gpu/replicate.py [--gib 8] [--model]

--gib is the size of the model in GiB. With --model, only the model is broadcast, which takes one minute instead of three. The last line
reports whether all bytes were right. Exits with 1 if not, and with 77 if there are fewer than two GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mpgpu
import mpgpu.torch
import torch

SHAPES = [(4096, 14336), (14336, 4096), (4096, 4096), (1024, 4096), (4096,)]


def seconds(work: Callable[[], Any], rounds: int = 9) -> float:
    taken = []
    for _ in range(-3, rounds):
        begin = time.perf_counter()
        work()
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[3:])


def copies(targets: list[Any], source: Any) -> None:
    """Makes concurrent copies to all GPUs."""
    for target in targets:
        with torch.cuda.stream(streams[target.device.index]):
            target.copy_(source, non_blocking=True)


def buffer(kind: str, part: Any, gpus: list[int]) -> bool:
    size = part.nbytes
    targets = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus]
    nccl = seconds(lambda: torch.cuda.nccl.broadcast([part, *targets])) if part.is_cuda else float("nan")
    alone = seconds(lambda: copies(targets, part))
    star = mpgpu.Plan([(target, part) for target in targets], max_paths=1)
    plan = mpgpu.Plan([(target, part) for target in targets])
    single = seconds(lambda: star.execute().synchronize())
    trees = seconds(lambda: plan.execute().synchronize(), rounds=25)
    for target in targets:
        target.zero_()
    plan.execute().synchronize()
    wrong = sum(not torch.equal(target, part.to(target.device)) for target in targets)
    print(
        f"{kind:28} {size >> 20:5} MiB: ms by copies {alone * 1e3:8.3f}, by a plan of copies {single * 1e3:8.3f}, "
        f"passed on {trees * 1e3:8.3f} ({trees / alone:.3f} of copies), NCCL {nccl * 1e3:8.3f}{'' if wrong == 0 else '  WRONG'}",
        flush=True,
    )
    if size == 1 << 30:
        print(plan.describe(), flush=True)
    return wrong == 0


def buffers(kind: str, source: Any, gpus: list[int]) -> bool:
    sizes = (16 << 20, 64 << 20, 256 << 20, 1 << 30, 4 << 30)
    right = [buffer(kind, source[:size], gpus) for size in sizes]
    return all(right)


def model(kind: str, gib: float, place: Callable[[Any], Any]) -> bool:
    state, total = {}, 0
    while total < gib * 2**30:
        shape = SHAPES[len(state) % len(SHAPES)]
        tensor = torch.randint(-1000, 1000, shape, dtype=torch.int16)
        state[f"layer.{len(state)}"] = tensor.view(torch.bfloat16)
        total += tensor.nbytes
    state = place(state)
    devices = [f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())]

    def each() -> list[Any]:
        return [{name: tensor.to(device, non_blocking=True) for name, tensor in state.items()} for device in devices]

    by_torch = seconds(each, rounds=3)
    begin = time.perf_counter()
    moved = mpgpu.torch.to(state, devices)
    first = time.perf_counter() - begin
    wrong = sum(not torch.equal(one[name].cpu().view(torch.int16), state[name].view(torch.int16)) for one in moved for name in state)
    del moved
    by_mpgpu = seconds(lambda: mpgpu.torch.to(state, devices), rounds=7)
    print(
        f"model of {total / 2**30:.1f} GiB, {len(state)} tensors, {kind}: s by tensor.to {by_torch:.3f}, "
        f"mpgpu.torch.to {first:.3f} at first, then {by_mpgpu:.3f} ({by_mpgpu / by_torch:.3f}){'' if wrong == 0 else '  WRONG'}",
        flush=True,
    )
    return wrong == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--model", action="store_true")
    arguments = parser.parse_args()
    count = torch.cuda.device_count()
    if count < 2:
        print("gpu replicate: skipped: fewer than two GPUs")
        sys.exit(77)
    print(f"{torch.cuda.get_device_name(0)} x{count}, torch {torch.__version__}", flush=True)
    streams = [torch.cuda.Stream(gpu) for gpu in range(count)]
    right = True
    if not arguments.model:
        pinned = mpgpu.torch.empty(4 << 30, torch.uint8)
        pinned.random_(0, 255)
        right = buffers("pinned, to all GPUs", pinned, list(range(count)))
        ordinary = torch.empty(4 << 30, dtype=torch.uint8).random_(0, 255)
        right = buffers("ordinary memory, to all GPUs", ordinary, list(range(count))) and right
        if count > 2:
            right = buffers("from GPU 0 to all others", pinned.to("cuda:0"), list(range(1, count))) and right
        del ordinary
    right = model("pinned", arguments.gib, mpgpu.torch.pin) and right
    right = model("ordinary memory", arguments.gib, lambda state: state) and right
    print("all is right" if right else "something is WRONG")
    sys.exit(0 if right else 1)
