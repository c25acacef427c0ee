#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies the tensors of a model from pinned host memory to one GPU over the PCIe links of all GPUs, by one plan. Compares with torch.

python load_weights.py [--mebibytes 2048] [--layers 32] [--repeat 10]

On the host backend (MPGPU_BACKEND=host), with NumPy only, the same plan runs on virtual devices and its time is predicted. Every byte is
compared.
"""

import argparse
import statistics
import sys
import time

import mpgpu


def shapes(mebibytes, layers):
    """Yields the names and shapes of a transformer's weights: large matrices and many small vectors, `mebibytes` MiB of 16-bit numbers."""
    width = max(64, int((mebibytes * 2**20 / 2 / layers / 12) ** 0.5) // 64 * 64)
    for layer in range(layers):
        for name, shape in [("qkv", (3 * width, width)), ("out", (width, width)), ("up", (4 * width, width)), ("down", (width, 4 * width))]:
            yield f"layers.{layer}.{name}.weight", shape
            yield f"layers.{layer}.{name}.bias", shape[:1]
        yield f"layers.{layer}.norm.weight", (width,)


def report(method, size, seconds):
    median = statistics.median(seconds)
    spread = f"from {min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} ms"
    print(f"{method:42} {median * 1e3:9.2f} ms  {size / median / 1e9:7.1f} GB/s   {spread}")
    return median


def with_torch(options):
    import mpgpu.torch
    import torch

    torch.manual_seed(1)
    names = dict(shapes(options.mebibytes, options.layers))
    weights = mpgpu.torch.pin({name: torch.randn(shape).to(torch.bfloat16) for name, shape in names.items()})
    by_torch = {name: tensor.pin_memory() for name, tensor in weights.items()}
    on_gpu = {name: torch.empty_like(tensor, device="cuda:0") for name, tensor in weights.items()}
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{len(weights)} tensors, {size / 2**20:.0f} MiB in all, to cuda:0 of {torch.cuda.device_count()} GPUs")

    def copies(source):
        for name, tensor in source.items():
            on_gpu[name].copy_(tensor, non_blocking=True)

    def right():
        return all(torch.equal(on_gpu[name].cpu().view(torch.int16), weights[name].view(torch.int16)) for name in names)

    plan = mpgpu.torch.plan(on_gpu, weights)
    from_torch = mpgpu.torch.plan(on_gpu, by_torch)
    methods = {
        "torch: copy_, pinned by torch": lambda: copies(by_torch),
        "torch: copy_, pinned by mpgpu": lambda: copies(weights),
        "mpgpu: one plan, pinned by torch": from_torch.execute,
        "mpgpu: one plan, pinned by mpgpu": plan.execute,
    }
    medians = {}
    for method, run in methods.items():
        seconds = []
        for _ in range(options.repeat + 2):
            for tensor in on_gpu.values():
                tensor.zero_()
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            if not right():
                print(f"{method}: BYTES DIFFER")
                return 1
        # The first two executions create graphs, staging memory and streams, and are not counted.
        medians[method] = report(method, size, seconds[2:])
    fastest = min(value for method, value in medians.items() if method.startswith("torch"))
    print(f"mpgpu is {fastest / medians['mpgpu: one plan, pinned by mpgpu']:.2f} times as fast as torch; every byte right")
    return 0


def with_numpy(options):
    import numpy

    random = numpy.random.default_rng(1)
    names = dict(shapes(min(options.mebibytes, 256), options.layers))
    weights = {name: mpgpu.empty(shape, "uint16") for name, shape in names.items()}
    on_gpu = {name: mpgpu.empty(shape, "uint16", device=0) for name, shape in names.items()}
    for name, weight in weights.items():
        weight.numpy()[:] = random.integers(0, 2**16, names[name], dtype=numpy.uint16)
        on_gpu[name].numpy()[:] = 0
    plan = mpgpu.Plan([(on_gpu[name], weight) for name, weight in weights.items()])
    plan.execute().synchronize()
    info = plan.info
    print(f"{len(weights)} arrays, {info.bytes / 2**20:.0f} MiB in all, to virtual GPU 0 of {mpgpu.default_context().gpus}")
    print(f"modelled: {info.predicted_seconds * 1e3:.2f} ms by {info.paths} paths; {info.direct_seconds * 1e3:.2f} ms with one path each")
    same = all(numpy.array_equal(on_gpu[name].numpy(), weight.numpy()) for name, weight in weights.items())
    print("every byte right" if same else "BYTES DIFFER")
    return 0 if same else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    if mpgpu.default_context().backend == "host":
        return with_numpy(options)
    try:
        import torch
    except ImportError:
        print("skipped: on GPUs this example needs torch; MPGPU_BACKEND=host runs it on virtual devices with NumPy")
        return 0
    if not torch.cuda.is_available():
        print("skipped: this torch sees no GPU; MPGPU_BACKEND=host runs it on virtual devices with NumPy")
        return 0
    return with_torch(options)


if __name__ == "__main__":
    sys.exit(main())
