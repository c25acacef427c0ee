#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the cost of `Plan.execute` beyond `mp_execute`, on the host backend or on GPUs: `python python/bench/execute.py [--gpu]`.

Compares, in the same run and alternating, calls of the package with calls of the C functions by cffi, minus the time that cffi itself takes
for the same number of calls of an empty function. The plan is one copy of 8 bytes. Prints medians of batches, in microseconds of processor
time of the calling thread per call, because on the host backend other threads copy meanwhile.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any, Callable

import mpgpu
from mpgpu._dropped import collect
from mpgpu._library import NULL, ffi, lib

BATCHES, CALLS = 401, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="on the CUDA backend instead of virtual devices")
    random.seed(1)
    gpu = parser.parse_args().gpu
    context = mpgpu.Context("cuda" if gpu else "host")
    src, dst = context.empty(8, device=0), context.empty(8, device=0)
    plan = mpgpu.Plan([(dst, src)])
    stream = mpgpu.Stream(0, context=context)
    number, handle, raw = int(stream), stream._handle, plan._handle
    execute, test, wait, version = lib.mp_execute, lib.mp_test, lib.mp_wait, lib.mp_version
    request, done = ffi.new("mp_request_t *"), ffi.new("int32_t *")

    def c_execute_wait() -> None:
        execute(raw, handle, request)
        wait(request, NULL)

    def c_execute_test() -> None:
        # Calls of a loop that keeps no request: one execution, and one check of an earlier one.
        execute(raw, handle, request)
        if test(request, done, NULL) or not done[0]:
            lib.mp_request_destroy(request)

    def c_execute() -> None:
        execute(raw, handle, NULL)

    cases: dict[str, Callable[[], Any]] = {
        "cffi alone: mp_version()": version,
        "C: mp_execute without request": c_execute,
        "C: mp_execute, mp_wait": c_execute_wait,
        "C: mp_execute, mp_test": c_execute_test,
        "plan.execute(stream).synchronize()": lambda: plan.execute(stream).synchronize(),
        "plan.execute(stream)": lambda: plan.execute(stream),
        "plan.execute(number)": lambda: plan.execute(number),
        "plan.execute()": lambda: plan.execute(),
    }
    readings: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(BATCHES):
        # The preceding case determines if the copy threads are awake, and waking them costs time of the caller. Therefore the order is
        # random.
        for name in random.sample(list(cases), len(cases)):
            call = cases[name]
            started = time.thread_time()
            for _ in range(CALLS):
                call()
            readings[name].append((time.thread_time() - started) / CALLS * 1e6)
            plan.execute().synchronize()
            stream.synchronize()
            collect(1000)
    median = {name: statistics.median(values) for name, values in readings.items()}
    for name, value in median.items():
        quartiles = statistics.quantiles(readings[name], n=4)
        print(f"{name:32} {value:7.2f} us   quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f}")
    calls = 2 * median["cffi alone: mp_version()"]
    print()
    for name, against in [
        ("plan.execute(stream).synchronize()", "C: mp_execute, mp_wait"),
        ("plan.execute(stream)", "C: mp_execute, mp_test"),
        ("plan.execute(number)", "C: mp_execute, mp_test"),
        ("plan.execute()", "C: mp_execute, mp_test"),
    ]:
        print(f"{name:32} {median[name] - median[against] + calls:7.2f} us beyond C")


if __name__ == "__main__":
    main()
