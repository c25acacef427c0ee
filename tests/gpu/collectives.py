#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures collectives between ranks that each see one GPU, and compares them with NCCL: broadcast, all-gather and all-to-all of blocks
from 4 KiB to 1 GiB. Each collective is made by NCCL (torch.distributed), by a node plan that uses one path, and by a node plan that uses
all paths. The collectives run in successive steps on one stream, and in a captured graph. Every byte is compared. Requires torch with CUDA
and two GPUs, but no compiler.

    python3 tests/gpu/collectives.py [--ranks N] [--most BYTES]

--ranks is the number of ranks (by default the number of all GPUs). --most is the size of the largest block in bytes (by default 2^30).
Times are those of the slowest rank, and medians of nine rounds in which all methods alternate. The last line reports whether all bytes were
right. Exits with 1 if not, and with 77 if there are fewer than two GPUs. With MPGPU_BACKEND=host, the script runs on virtual devices, with
gloo instead of NCCL, to test the script itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

ROUNDS = 9
STEPS = 8
HOST = os.environ.get("MPGPU_BACKEND") == "host"


class Rank:
    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        # Each process sees only its own GPU, as if a job scheduler had set the variable. It must be set before CUDA is initialised.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")[rank]
        import mpgpu
        import torch
        import torch.distributed

        self.rank, self.ranks, self.torch, self.mpgpu = rank, ranks, torch, mpgpu
        self.distributed = torch.distributed
        place = {} if HOST else {"device_id": torch.device("cuda", 0)}
        self.distributed.init_process_group(
            "gloo" if HOST else "nccl", init_method=f"file://{folder}/group", rank=rank, world_size=ranks, **place
        )
        self.node = mpgpu.Node(rank=rank, ranks=ranks, socket=f"{folder}/ranks", devices=[rank if HOST else 0])
        self.wrong = 0

    def empty(self, size: int) -> Any:
        if HOST:
            return self.torch.from_dlpack(self.mpgpu.empty(size, "u1", shared=True))
        return self.torch.empty(size, dtype=self.torch.uint8, device="cuda")

    def say(self, *text: Any) -> None:
        if self.rank == 0:
            print(*text, flush=True)

    def longest(self, us: float) -> float:
        """Returns the maximum of the times of all ranks. The call is also a barrier."""
        value = self.torch.tensor([us], dtype=self.torch.float64, device="cpu" if HOST else "cuda")
        self.distributed.all_reduce(value, op=self.distributed.ReduceOp.MAX)
        return float(value.item())

    def random(self, seed: int, size: int) -> Any:
        """Returns random bytes, which are equal on every rank."""
        device = "cpu" if HOST else "cuda"
        return self.torch.randint(
            0, 256, (size,), dtype=self.torch.uint8, device=device, generator=self.torch.Generator(device).manual_seed(seed)
        )

    def in_a_row(self, step: Callable[[], Any], steps: int) -> float:
        """Returns the time per step in microseconds if steps follow each other without waiting."""
        self.longest(0)
        if HOST:
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            return self.longest((time.perf_counter() - begin) / steps * 1e6)
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(steps):
            step()
        last.record()
        last.synchronize()
        return self.longest(first.elapsed_time(last) / steps * 1e3)

    def captured(self, step: Callable[[], Any]) -> Callable[[], Any]:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(STEPS):
                step()
        return graph.replay

    def planned(self, halves: list[Any], **options: Any) -> Callable[[], Any]:
        plan = self.node.plan_exchange(halves, **options)
        if HOST:
            return lambda: plan.execute().synchronize()
        return lambda: plan.execute(self.torch.cuda.current_stream())

    def measure(self, kind: str, size: int) -> None:
        ranks, rank, nccl = self.ranks, self.rank, self.distributed
        expected = [self.random(from_, size) for from_ in ([0] if kind == "broadcast" else range(ranks))]
        if kind == "broadcast":
            whole = self.empty(size)
            halves, by_nccl = self.node.broadcast(whole, 0), lambda: nccl.broadcast(whole, 0)
        elif kind == "all_gather":
            own, whole = self.empty(size), self.empty(size * ranks)
            own.copy_(expected[rank])
            halves, by_nccl = self.node.all_gather(own, whole), lambda: nccl.all_gather_into_tensor(whole, own)
        else:
            sent, whole = self.empty(size * ranks), self.empty(size * ranks)
            for to in range(ranks):
                sent[to * size : (to + 1) * size].copy_(expected[rank] + to)
            expected = [part + rank for part in expected]
            halves, by_nccl = self.node.all_to_all(sent, whole), lambda: nccl.all_to_all_single(whole, sent)

        ways = {"NCCL": by_nccl, "one path": self.planned(halves, max_paths=1, host_path=False), "all paths": self.planned(halves)}
        wrong = self.compare(ways, whole, expected, kind)
        forms = {"in a row": (ways, 1, max(4, min(100, (64 << 20) // size)))}
        if not HOST and size <= 64 << 20:
            graphs = {name: self.captured(step) for name, step in ways.items()}
            wrong += self.compare(graphs, whole, expected, kind)
            forms["captured"] = (graphs, STEPS, max(2, min(20, (16 << 20) // size)))
        for form, (steps, each, count) in forms.items():
            times: dict[str, list[float]] = {name: [] for name in steps}
            for turn in range(-2, ROUNDS):
                for name, step in steps.items():
                    us = self.in_a_row(step, count) / each
                    if turn >= 0:
                        times[name].append(us)
            middle = {name: statistics.median(taken) for name, taken in times.items()}
            best = middle["all paths"]
            self.say(
                f"{kind:10} {size:11} B {form:9}" + "".join(f"{name:>10} {us:9.1f}" for name, us in middle.items()),
                f"us; of NCCL {middle['NCCL'] / best:6.3f}, of one path {middle['one path'] / best:6.3f}",
            )
        wrong += self.compare(ways, whole, expected, kind)
        if wrong:
            print(f"{kind} of {size} B: rank {rank} saw {wrong} wrong bytes", flush=True)
            self.wrong += wrong

    def compare(self, ways: dict[str, Callable[[], Any]], whole: Any, expected: list[Any], kind: str) -> int:
        """Runs all methods and returns the total number of wrong bytes."""
        wrong = 0
        for step in ways.values():
            if kind == "broadcast" and self.rank == 0:
                whole.copy_(expected[0])
            else:
                whole.zero_()
            self.longest(0)
            step()
            if not HOST:
                self.torch.cuda.synchronize()
            wrong += sum(int((part != bytes_).sum()) for part, bytes_ in zip(whole.view(len(expected), -1), expected))
        return wrong


def rank_of(rank: int, ranks: int, folder: str, least: int, most: int, answers: Any) -> None:
    try:
        here = Rank(rank, ranks, folder)
        for kind in ("broadcast", "all_gather", "all_to_all"):
            size = least
            while size <= most:
                here.measure(kind, size)
                size *= 4 if least == 4096 else 2
        answers.put(here.wrong)
        here.distributed.destroy_process_group()
    except BaseException:
        answers.put(traceback.format_exc())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--least", type=int, default=4096)
    parser.add_argument("--most", type=int, default=1 << 30)
    given = parser.parse_args()
    found = subprocess.run("nvidia-smi --list-gpus", shell=True, capture_output=True, text=True).stdout.count("GPU ")
    ranks = given.ranks or (2 if HOST else found)
    if not HOST and (found < ranks or ranks < 2):
        print(f"gpu collectives: skipped: {found} GPUs in sight")
        return 77
    if not HOST:
        subprocess.run("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader", shell=True, check=True)
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [spawn.Process(target=rank_of, args=(rank, ranks, folder, given.least, given.most, answers)) for rank in range(ranks)]
        for process in processes:
            process.start()
        said = []
        for _ in processes:
            said.append(answers.get(timeout=500))
            if said[-1] != 0:
                break
        for process in processes:
            process.join(30 if said[-1] == 0 else 1)
            process.kill()
    wrong = [each for each in said if each != 0]
    for each in wrong:
        print(each)
    print("gpu collectives: something is WRONG" if wrong else "gpu collectives: every byte was right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
