#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two-dimensional Jacobi relaxation. The rows are divided among the devices of one node. Uses CuPy on GPUs, NumPy on virtual devices.

python halo.py [ROWS COLUMNS STEPS]     # MPGPU_BACKEND=host for virtual devices on a machine with GPUs
"""

import sys

import mpgpu
import numpy


def arrays(xp, device, rows, columns):
    """Returns two arrays on a device, each with a ghost row above and below. The left edge is 1."""
    if xp is numpy:
        pair = [mpgpu.empty((rows + 2, columns), "float64", device).numpy() for _ in range(2)]
    else:
        xp.cuda.Device(device).use()
        pair = [xp.empty((rows + 2, columns)) for _ in range(2)]
    for array in pair:
        array[:], array[:, 0] = 0, 1
    return pair


def step(old, new):
    new[1:-1, 1:-1] = (old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]) / 4


def halo(parts):
    """Returns one plan for all copies of a time step, in which each part receives the edge rows of its neighbours."""
    pairs = [(lower[:1], upper[-2:-1]) for upper, lower in zip(parts, parts[1:])]
    pairs += [(upper[-1:], lower[1:2]) for upper, lower in zip(parts, parts[1:])]
    return mpgpu.Plan(pairs)


def relax(xp, devices, rows, columns, steps):
    old, new = map(list, zip(*(arrays(xp, device, rows // len(devices), columns) for device in devices)))
    plans = halo(old), halo(new)
    for number in range(steps):
        for device, source, result in zip(devices, old, new):
            if xp is not numpy:
                xp.cuda.Device(device).use()
            step(source, result)
        # On GPUs the copies run in the order of CuPy's current streams, and the host does not wait. NumPy has no streams, so wait for the
        # request.
        request = plans[1 - number % 2].execute()
        if xp is numpy:
            request.synchronize()
        old, new = new, old
    return numpy.concatenate([part[1:-1] if xp is numpy else xp.asnumpy(part[1:-1]) for part in old]), plans[0]


def main():
    rows, columns, steps = (int(text) for text in sys.argv[1:4]) if len(sys.argv) > 3 else (1024, 4096, 20)
    context = mpgpu.default_context()
    xp = numpy
    if context.backend == "cuda":
        try:
            import cupy as xp
        except ImportError:
            print("skipped: on GPUs this example needs CuPy (pip install cupy-cuda13x); MPGPU_BACKEND=host runs it on virtual devices")
            return 0
    devices = list(range(min(context.gpus, 4)))
    together, plan = relax(xp, devices, rows - rows % len(devices), columns, steps)
    alone, _ = relax(xp, devices[:1], rows - rows % len(devices), columns, steps)
    print(plan.describe())
    same = bool((together == alone).all())
    verdict = "equal to" if same else "DIFFERS FROM"
    print(f"halo: {steps} steps of {together.shape[0]} x {columns} on {len(devices)} devices: {verdict} one device's")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
