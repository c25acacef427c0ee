#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the cost of `copy_blocks` beyond `mp_copy_blocks`, on the host backend or on GPUs: `python python/bench/pieces.py [--gpu]`.

Compares, in the same run and alternating, calls of the package with calls of the C function by cffi. Arrays are torch tensors if torch is
installed, otherwise NumPy arrays. Each call copies 16 of 64 small blocks in each layer. Prints medians of batches, in microseconds of
processor time of the calling thread per call, because on the host backend other threads copy meanwhile.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any, Callable

import mpgpu
import numpy
from mpgpu._dropped import collect
from mpgpu._library import NULL, ffi, lib

try:
    import torch
except ImportError:
    torch = None

BATCHES, CALLS, COUNT = 101, 50, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="on the CUDA backend instead of virtual devices; requires torch")
    random.seed(1)
    gpu = parser.parse_args().gpu
    context = mpgpu.Context("cuda" if gpu else "host")
    stream = mpgpu.Stream(0, context=context)

    def array(device: int) -> Any:
        if gpu and device >= 0:
            return torch.zeros((64, 32), device=f"cuda:{device}")
        found = context.empty((64, 32), "float32", device).numpy()
        return torch.from_numpy(found) if torch is not None else found

    def address(of: Any) -> int:
        return int(of.ctypes.data if isinstance(of, numpy.ndarray) else of.data_ptr())

    indices: dict[str, Any] = {"list": list(range(COUNT)), "NumPy": numpy.arange(COUNT)}
    if torch is not None:
        indices["tensor"] = torch.arange(COUNT)
    listed = ffi.new("uint64_t[]", list(range(COUNT)))
    request, done = ffi.new("mp_request_t *"), ffi.new("int32_t *")
    cases: dict[str, Callable[[], Any]] = {}
    keep = []
    for layers in (1, 32):
        dst, src = [array(-1) for _ in range(layers)], [array(0) for _ in range(layers)]
        to, of = (ffi.new("uintptr_t[]", [address(each) for each in end]) for end in (dst, src))
        keep.append((dst, src, to, of))
        blocks = ffi.new("mp_blocks_t *")
        blocks.size = ffi.sizeof("mp_blocks_t")
        blocks.dst, blocks.src, blocks.layers = ffi.cast("void **", to), ffi.cast("const void **", of), layers
        blocks.block_bytes, blocks.count, blocks.dst_blocks, blocks.src_blocks = 128, COUNT, 64, 64
        blocks.dst_index, blocks.src_index, blocks.index_bytes = listed, listed, 8

        def by_c(blocks: Any = blocks) -> None:
            # Calls of a loop that keeps no request: each makes one copy and checks one earlier copy.
            lib.mp_copy_blocks(context._handle, blocks, NULL, stream._handle, request)
            if lib.mp_test(request, done, NULL) or not done[0]:
                lib.mp_request_destroy(request)

        cases[f"{layers} layers, C"] = by_c
        ends = (dst, src) if layers > 1 else (dst[0], src[0])
        for name, index in indices.items():
            cases[f"{layers} layers, {name}"] = lambda ends=ends, index=index: mpgpu.copy_blocks(*ends, index, index, stream=stream)
    readings: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(BATCHES):
        for name in random.sample(list(cases), len(cases)):
            call = cases[name]
            started = time.thread_time()
            for _ in range(CALLS):
                call()
            readings[name].append((time.thread_time() - started) / CALLS * 1e6)
            stream.synchronize()
            collect(1000)
    print(f"arrays of {'torch' if torch is not None else 'NumPy'}")
    for name, values in readings.items():
        quartiles = statistics.quantiles(values, n=4)
        beyond = statistics.median(values) - statistics.median(readings[f"{name.partition(',')[0]}, C"])
        print(f"{name:20} {statistics.median(values):7.1f} us   quartiles {quartiles[0]:.1f} to {quartiles[2]:.1f}   beyond C {beyond:.1f}")


if __name__ == "__main__":
    main()
