#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures copies of many pieces between pinned host memory and a GPU, with the Python package and torch.

    python3 tests/gpu/pieces.py [--unchanged MPGPU] WHEEL...

WHEEL is the wheel of mpgpu, followed by the wheels of packages that this Python lacks (cffi). Without a wheel, the installed mpgpu is used.
MPGPU is the `mpgpu` command, for the batched copies of a program that does not use mpgpu. Parts of the program:

    rates      10,000 pieces in random order (at most 400 MiB): the driver's batched copy, and `copy_blocks` with and without pacing
    beside     effect on concurrent matrix products (8192 x 8192, bfloat16) and on concurrent large copies
    calls      time from the call to its return, with another index list in each call
    links      rates, as in `rates`, if the links of all GPUs to host memory carry parts of the pieces
    batches    (with --unchanged) the driver's batched copy with and without `mpgpu run`

Every part except `beside` and `calls` compares all bytes. Rates are medians of 7, in 10^9 bytes per second. Exits with 0, with 1 if a byte
was wrong, and with 77 if there is no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable

WHOLE = 512 << 20
MOST = 400 << 20
PIECES = 10_000
SIZES = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
DIRECTIONS = ("to", "from")


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: sources are read in stream order, and the copies may overlap with computation."""

    _fields_ = [("order", ctypes.c_int), ("src", Location), ("dst", Location), ("flags", ctypes.c_uint)]


class Case:
    """Pages of one size in pinned host memory and in memory of GPU 0, and random lists of them."""

    def __init__(self, size: int, seed: int) -> None:
        import numpy
        import torch

        self.size, self.count = size, min(PIECES, MOST // size)
        self.host = torch.empty(WHOLE, dtype=torch.uint8).pin_memory()
        self.gpu = torch.empty(WHOLE, dtype=torch.uint8, device="cuda:0")
        random = numpy.random.default_rng(seed)
        self.lists = [[random.permutation(WHOLE // size)[: self.count] for _ in range(2)] for _ in range(8)]
        self.pages = [each.view(-1, size) for each in (self.host, self.gpu)]
        self.stream = torch.cuda.Stream(0)

    def fill(self) -> None:
        import torch

        for memory in (self.host, self.gpu):
            memory.random_(0, 255)
        torch.cuda.synchronize()

    def ends(self, way: str, at: int) -> tuple[Any, Any, Any, Any]:
        """Destination and source pages, and the lists of their indices."""
        on_host, on_gpu = self.lists[at]
        host, gpu = self.pages
        return (gpu, host, on_gpu, on_host) if way == "to" else (host, gpu, on_host, on_gpu)

    def check(self, way: str, copy: Callable[[int], None], what: str) -> None:
        """Copies once, and compares all bytes, including those that must not change."""
        import torch

        self.fill()
        dst, src, to, of = self.ends(way, 0)
        expected = dst.clone()
        expected[torch.from_numpy(to).to(dst.device)] = src[torch.from_numpy(of).to(src.device)].to(dst.device)
        copy(0)
        torch.cuda.synchronize()
        if not torch.equal(expected, dst):
            sys.exit(f"{what}: {way} the GPU, {self.size} bytes: wrong bytes")


def driver_batch(case: Case, way: str) -> Callable[[int], None]:
    """Returns a function that makes the copies of a list with the driver's batched copy. The arguments are prepared in advance."""
    import numpy

    driver = ctypes.CDLL("libcuda.so.1")
    call = driver.cuMemcpyBatchAsync_v2
    prepared = []
    for at in range(len(case.lists)):
        dst, src, to, of = case.ends(way, at)
        addresses = [
            (list_.astype(numpy.uint64) * numpy.uint64(case.size) + numpy.uint64(pages.data_ptr()))
            for list_, pages in ((to, dst), (of, src))
        ]
        prepared.append((*addresses, numpy.full(case.count, case.size, numpy.uint64)))
    how, first = Attributes(1, Location(), Location(), 1), ctypes.c_size_t(0)

    def copy(at: int) -> None:
        to, of, sizes = (ctypes.c_void_p(each.ctypes.data) for each in prepared[at])
        code = call(
            to,
            of,
            sizes,
            ctypes.c_size_t(case.count),
            ctypes.byref(how),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(case.stream.cuda_stream),
        )
        if code:
            sys.exit(f"cuMemcpyBatchAsync: error {code}")

    return copy


def blocks(case: Case, way: str, **options: Any) -> Callable[[int], None]:
    """Returns a function that makes the copies of a list with `copy_blocks`."""
    import mpgpu

    def copy(at: int) -> None:
        dst, src, to, of = case.ends(way, at)
        mpgpu.copy_blocks(dst, src, to, of, stream=case.stream, **options)

    return copy


def rate(case: Case, copy: Callable[[int], None]) -> tuple[float, float]:
    """Returns the rate of copies back to back, and the microseconds of one call."""
    import torch

    copy(0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    copy(0)
    case.stream.synchronize()
    # A round lasts about 50 ms, at most 32 copies, because the first call of a round cannot overlap with an earlier copy.
    times = max(2, min(32, int(0.05 / (time.perf_counter() - begin))))
    rates, calls = [], []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for at in range(times):
            called = time.perf_counter()
            copy(at % len(case.lists))
            calls.append(time.perf_counter() - called)
        case.stream.synchronize()
        rates.append(times * case.size * case.count / (time.perf_counter() - begin) / 1e9)
    return statistics.median(rates), statistics.median(calls) * 1e6


def rates(sizes: tuple[int, ...], what: str) -> None:
    """Prints the rates of all forms."""
    for size in sizes:
        case = Case(size, seed=size)
        for way in DIRECTIONS:
            forms: dict[str, Callable[[int], None]] = {"driver's batch": driver_batch(case, way), "4 multiprocessors": blocks(case, way)}
            if way == "from":
                forms["8 multiprocessors"] = blocks(case, way, multiprocessors=8)
                forms["not paced"] = blocks(case, way, paced=False)
            for name, copy in forms.items():
                case.check(way, copy, name)
                found, call = rate(case, copy)
                print(f"{what}: {way:4} the GPU, {case.count} of {size:6} B, {name:17}: {found:5.1f} GB/s, call {call:7.0f} us", flush=True)


def time_alone(own: Any, work: Callable[[], None]) -> float:
    """Returns the time of `work` in the stream `own`."""
    import torch

    took = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(own):
            work()
        own.synchronize()
        took.append(time.perf_counter() - begin)
    return statistics.median(took[1:])


def time_beside(own: Any, work: Callable[[], None], case: Case, copy: Callable[[int], None], total: float) -> tuple[float, float]:
    """Returns the time of `work` while copies of pieces run, and the rate of the copies that ended during this time."""
    import torch

    found = []
    for _ in range(3):
        bytes_ = case.size * case.count
        times = max(4, int(total * 60e9 * 2 / bytes_))
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(own):
            work()
        ends[0].record(case.stream)
        for at in range(times):
            copy(at % len(case.lists))
            ends[at + 1].record(case.stream)
        own.synchronize()
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        done = [ends[0].elapsed_time(end) / 1e3 for end in ends[1:]]
        ended = [end for end in done if end <= took]
        found.append((took, len(ended) * bytes_ / ended[-1] / 1e9 if ended else 0.0))
    return sorted(found)[1]


def beside() -> None:
    """Prints how much copies of pieces slow down concurrent matrix products and large copies, and their own rate meanwhile."""
    import torch

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right, product = torch.randn_like(left), torch.empty_like(left)
    far, near = torch.empty(WHOLE // 2, dtype=torch.uint8).pin_memory(), torch.empty(WHOLE // 2, dtype=torch.uint8, device="cuda")
    own = torch.cuda.Stream(0)

    def products() -> None:
        for _ in range(80):
            torch.matmul(left, right, out=product)

    def copies(dst: Any, src: Any, times: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(times):
                dst.copy_(src, non_blocking=True)

        return work

    works = {"products": products, "copies to the GPU": copies(near, far, 16), "copies from the GPU": copies(far, near, 16)}
    if torch.cuda.device_count() > 1:
        works["copies to GPU 1"] = copies(torch.empty_like(near, device="cuda:1"), near, 100)
    for _ in range(4):
        products()
    times = {name: time_alone(own, work) for name, work in works.items()}
    print("beside: alone:", ", ".join(f"{name} {taken * 1e3:.1f} ms" for name, taken in times.items()))
    for size in (4 << 10, 16 << 10, 64 << 10):
        case = Case(size, seed=size)
        for way in DIRECTIONS:
            forms = {"4 multiprocessors": blocks(case, way)}
            if way == "from":
                forms["not paced"] = blocks(case, way, paced=False)
            for form, copy in forms.items():
                kept = []
                for name, work in works.items():
                    took, found = time_beside(own, work, case, copy, times[name])
                    kept.append(f"{name} keep {times[name] / took:.3f} (pieces {found:.1f} GB/s)")
                print(f"beside: {way:4} the GPU, {size:6} B, {form:17}: " + "; ".join(kept), flush=True)


def calls() -> None:
    """Prints the time of a call, with another list in each call, from Python and from C. For comparison, prints that of one driver copy."""
    case = Case(16 << 10, seed=5)
    for way in DIRECTIONS:
        calls_of(case, way)


def calls_of(case: Case, way: str) -> None:
    """Prints the times of calls for one direction."""
    import mpgpu
    from mpgpu._library import NULL, ffi, lib

    driver, context = ctypes.CDLL("libcuda.so.1"), mpgpu.default_context()
    request = ffi.new("mp_blocks_t *")
    dst, src, _, _ = case.ends(way, 0)
    to, of = (ffi.new("uintptr_t[]", [each.data_ptr()]) for each in (dst, src))
    request.size, request.layers, request.block_bytes, request.index_bytes = ffi.sizeof("mp_blocks_t"), 1, case.size, 8
    request.dst, request.src = ffi.cast("void **", to), ffi.cast("const void **", of)
    request.dst_blocks = request.src_blocks = WHOLE // case.size
    lists = [[ffi.from_buffer("uint64_t[]", each) for each in case.ends(way, at)[2:]] for at in range(len(case.lists))]
    stream = ffi.cast("mp_stream_t", case.stream.cuda_stream)
    plain = (
        ctypes.c_void_p(dst.data_ptr()),
        ctypes.c_void_p(src.data_ptr()),
        ctypes.c_size_t(64),
        ctypes.c_void_p(case.stream.cuda_stream),
    )

    def by_c(at: int) -> None:
        request.dst_index, request.src_index = lists[at]
        if lib.mp_copy_blocks(context._handle, request, NULL, stream, NULL):
            sys.exit("mp_copy_blocks failed")

    forms: tuple[tuple[str, Callable[[int], Any], int], ...] = (
        ("copy_blocks", blocks(case, way), case.count),
        ("mp_copy_blocks", by_c, case.count),
        ("mp_copy_blocks", by_c, 16),
        ("cuMemcpyAsync", lambda at: driver.cuMemcpyAsync(*plain), 0),
    )
    for name, copy, count in forms:
        request.count = count
        took = []
        for at in range(400):
            if at % 8 == 0:
                case.stream.synchronize()
            begin = time.perf_counter()
            copy(at % len(case.lists))
            took.append(time.perf_counter() - begin)
        median, worst = statistics.median(took) * 1e6, max(took[8:]) * 1e6
        print(f"calls: {way:4} the GPU, {name:14} with {count:5} indices: {median:.1f} us, worst {worst:.0f} us", flush=True)


def batches() -> None:
    """Prints the rates of the driver's batched copy in this process, which may run under `mpgpu run`."""
    import torch

    for size in SIZES:
        case = Case(size, seed=size)
        for way in DIRECTIONS:
            copy = driver_batch(case, way)
            for _ in range(2):  # Under `mpgpu run`, the first call starts the creation of mpgpu's context.
                copy(0)
                torch.cuda.synchronize()
                time.sleep(0.4)
            case.check(way, copy, "batch")
            found, call = rate(case, copy)
            print(f"{way:4} the GPU, {case.count} of {size:6} B: {found:5.1f} GB/s, call {call:7.0f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unchanged", help="the mpgpu command")
    parser.add_argument("--part", help="run one part in this process")
    parser.add_argument("wheels", nargs="*")
    asked = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "rates": lambda: rates(SIZES, "one link"),
        "links": lambda: rates((4 << 10, 16 << 10, 64 << 10), "all links"),
        "beside": beside,
        "calls": calls,
        "batches": batches,
    }
    if asked.part:
        parts[asked.part]()
        return 0
    try:
        import torch

        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    if gpus == 0:
        print("gpu pieces: skipped: no torch with a GPU")
        return 77
    print(f"{torch.cuda.get_device_name(0)}, {gpus} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MPGPU_BACKEND": "cuda"}
        if asked.wheels:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, *asked.wheels],
                check=True,
            )
            environment["PYTHONPATH"] = folder
        failed = 0
        first = {**environment, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        for part in ("rates", "calls") if gpus > 1 else ("rates", "calls", "beside"):
            failed |= subprocess.run([sys.executable, __file__, "--part", part], env=first, check=False).returncode
        if gpus > 1:
            every = {**environment, "MPGPU_RELAY_GPUS": ",".join(str(gpu) for gpu in range(gpus))}
            failed |= subprocess.run([sys.executable, __file__, "--part", "links"], env=every, check=False).returncode
            one = {**environment, "MPGPU_RELAY_GPUS": "none"}
            failed |= subprocess.run([sys.executable, __file__, "--part", "beside"], env=one, check=False).returncode
        if asked.unchanged:
            for prefix in ([], [asked.unchanged, "run", "--"]):
                print("unchanged, with mpgpu run:" if prefix else "unchanged, without:", flush=True)
                failed |= subprocess.run([*prefix, sys.executable, __file__, "--part", "batches"], env=first, check=False).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
