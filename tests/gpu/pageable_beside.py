#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the effect of copies of pageable host memory on concurrent work. The work is either matrix products on the destination GPU, or a
data loader with eight processes. It runs alone, concurrently with `tensor.to` in a thread, and concurrently with copies by mpgpu, with the
default number of threads and with two threads (MPGPU_HOST_THREADS). Also prints the rate of the copies and the number of the library's
threads. Requires torch with CUDA, but no compiler.

    python3 tests/gpu/pageable_beside.py

Every byte is compared after each method. Exits with 1 if a byte was wrong or there are more threads than the limit, and with 77 if there is
no GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 3.0
MIB = 1 << 20


def products(torch: Any, warm: Callable[[], None]) -> float:
    """Returns the matrix products per second of a training loop.

    The matrices have 8192 x 8192 elements, and the loop reads the loss after every eight products.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(4):
        a @ b
    torch.cuda.synchronize()
    warm()
    begin, done = time.monotonic(), 0
    while time.monotonic() < begin + SECONDS:
        for _ in range(8):
            c = a @ b
        float(c[0, 0])
        done += 8
    return done / (time.monotonic() - begin)


class Images:
    """Data set of random, normalised pictures, which uses the CPU like an image decoder."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(index)
        picture = torch.randint(0, 256, (3, 256, 256), dtype=torch.uint8, generator=generator)
        return picture.float().div_(255).sub_(0.45).div_(0.22)


def batches(torch: Any, warm: Callable[[], None]) -> float:
    """Returns the number of batches of 32 pictures per second that eight processes load."""
    torch.set_num_threads(1)
    loader = iter(torch.utils.data.DataLoader(Images(), batch_size=32, num_workers=8, prefetch_factor=4, multiprocessing_context="fork"))
    for _ in range(32):
        next(loader)
    # This call starts the processes of the data loader. They must be forked before the copy threads start.
    warm()
    begin, done = time.monotonic(), 0
    while time.monotonic() < begin + SECONDS:
        next(loader)
        done += 1
    return done / (time.monotonic() - begin)


def own_threads() -> int:
    """Returns the number of the library's threads that copy pageable memory."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("mpgpu-copy") for name in names)


def measure(work: str, way: str) -> None:
    """Runs in a separate process. Prints the rates of the work and of the copies, and true if every byte was right."""
    import torch

    torch.cuda.init()
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8)
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    ended, warmed, copied = threading.Event(), threading.Event(), []
    if way == "mpgpu":
        import mpgpu

    def copies() -> None:
        while not ended.is_set():
            begin = time.monotonic()
            with torch.cuda.stream(side):
                if way == "mpgpu":
                    mpgpu.copy(target, source, side).synchronize()
                else:
                    target.copy_(source)
            copied.append(source.nbytes / (time.monotonic() - begin) * 1e-9)
            # After this number of copies, the plan has finished trying its variants, including the driver's copy.
            if len(copied) >= (40 if way == "mpgpu" else 2):
                warmed.set()

    thread = threading.Thread(target=copies)

    def begin() -> None:
        if way != "alone":
            thread.start()
            warmed.wait(60)

    rate = {"products": products, "batches": batches}[work](torch, begin)
    threads = own_threads()
    ended.set()
    if way != "alone":
        thread.join()
    torch.cuda.synchronize()
    right = way == "alone" or torch.equal(target.cpu(), source)
    print(json.dumps({"rate": rate, "copied": statistics.median(copied or [0]), "threads": threads, "right": right}))


def main() -> int:
    if len(sys.argv) == 3:
        measure(sys.argv[1], sys.argv[2])
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu pageable_beside: skipped: torch sees no GPU")
        return 77
    print(f"{torch.cuda.get_device_name(0)} x{torch.cuda.device_count()}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    failed = 0
    for work in ("products", "batches"):
        alone = 0.0
        for name, way, limit in (("alone", "alone", 0), ("tensor.to", "to", 0), ("mpgpu", "mpgpu", 0), ("mpgpu, 2 threads", "mpgpu", 2)):
            environment = {**os.environ, **({"MPGPU_HOST_THREADS": str(limit)} if limit else {})}
            done = subprocess.run([sys.executable, __file__, work, way], env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
            if done.returncode != 0:
                print(f"{work:10} {name:18} FAILED with {done.returncode}")
                failed += 1
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            alone = alone or found["rate"]
            is_right = found["right"] and (not limit or found["threads"] <= limit)
            failed += not is_right
            print(
                f"{work:10} {name:18} {found['rate']:8.1f} in a second, {found['rate'] / alone:.3f} of alone; "
                f"copies {found['copied']:6.1f} GB/s, {found['threads']} threads  {'right' if is_right else 'WRONG'}",
                flush=True,
            )
    print("gpu pageable_beside: all was right" if not failed else f"gpu pageable_beside: {failed} FAILED")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
