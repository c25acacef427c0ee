#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Offloads pages of a paged key-value cache to pinned host memory layer by layer, and restores them to other pages of the cache.

python kv_cache.py [--layers 32] [--pages 512] [--moved 128] [--heads 8] [--head-dim 128] [--rounds 5]

A page has the keys and values of 16 tokens in one layer. On GPUs with torch, each layer of a model is a matrix product in torch's stream.
The pages of a layer are copied in a second stream as soon as that layer is computed, and the layers after it are computed meanwhile. On the
host backend (MPGPU_BACKEND=host), with NumPy only, the cache is on a virtual GPU. Every byte of the cache and of the host memory is
compared.
"""

import argparse
import statistics
import sys
import time

import mpgpu

TOKENS = 16


def choose(options, random):
    """Returns the pages that are offloaded, their places in host memory, and the pages to which they are restored."""
    return [random.permutation(options.pages)[: options.moved].copy() for _ in range(3)]


def with_numpy(options, shape):
    import numpy

    random = numpy.random.default_rng(1)
    cache = [mpgpu.empty(shape, "uint16", device=0) for _ in range(options.layers)]
    on_host = [mpgpu.empty(shape, "uint16") for _ in range(options.layers)]
    contents = random.integers(0, 2**16, shape, dtype=numpy.uint16)
    for number, (layer, place) in enumerate(zip(cache, on_host)):
        layer.numpy()[:] = contents + number
        place.numpy()[:] = 0
    stream = mpgpu.Stream(0)
    seconds = []
    wrong = 0
    for _ in range(options.rounds):
        evicted, slots, restored = choose(options, random)
        expected = [(layer.numpy().copy(), place.numpy().copy()) for layer, place in zip(cache, on_host)]
        for layer, place in expected:
            place[slots] = layer[evicted]
            layer[restored] = place[slots]
        started = time.perf_counter()
        # One call for each layer, as its pages become final during a step of the model.
        for layer, place in zip(cache, on_host):
            mpgpu.copy_blocks(place, layer, slots, evicted, stream=stream)
        # All layers by one call. It runs after the copies above, because both are in one stream.
        mpgpu.copy_blocks(cache, on_host, restored, slots, stream=stream)
        stream.synchronize()
        seconds.append(time.perf_counter() - started)
        for layer, place, (wanted, kept) in zip(cache, on_host, expected):
            wrong += not (numpy.array_equal(layer.numpy(), wanted) and numpy.array_equal(place.numpy(), kept))
    print(f"offload and restore by CPU threads on virtual devices: {statistics.median(seconds) * 1e3:.1f} ms (not a time of GPUs)")
    return wrong


def with_torch(options, shape):
    import numpy
    import torch

    random = numpy.random.default_rng(1)
    torch.manual_seed(1)
    gpu = torch.device("cuda:0")
    cache = [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=gpu) for _ in range(options.layers)]
    on_host = [torch.zeros(shape, dtype=torch.int16, pin_memory=True) for _ in range(options.layers)]
    weights = torch.randn(4096, 4096, device=gpu, dtype=torch.bfloat16) / 64
    state = torch.randn(4096, 4096, device=gpu, dtype=torch.bfloat16)
    copies = torch.cuda.Stream(gpu)
    computed = [torch.cuda.Event() for _ in cache]
    main = torch.cuda.current_stream(gpu)

    def step(pages=None, slots=None):
        """Computes all layers, and offloads the pages of each after its computation."""
        result = state
        for number, (layer, place) in enumerate(zip(cache, on_host)):
            result = result @ weights
            if pages is not None:
                computed[number].record(main)
                copies.wait_event(computed[number])
                mpgpu.copy_blocks(place, layer, slots, pages, stream=copies)
        main.wait_stream(copies)

    def measured(run):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    step()
    times = {"compute": [], "compute with offload": [], "restore": []}
    wrong = 0
    for number in range(options.rounds + 1):
        evicted, slots, restored = choose(options, random)
        expected = [(layer.cpu(), place.clone()) for layer, place in zip(cache, on_host)]
        for layer, place in expected:
            place[slots] = layer[evicted]
            layer[restored] = place[slots]
        # Index lists that kernels use too, for example block tables, may stay on the GPU.
        pages, places = torch.from_numpy(evicted).to(gpu), torch.from_numpy(slots).to(gpu)
        round_times = (
            measured(step),
            measured(lambda pages=pages, places=places: step(pages, places)),
            # All layers by one call, in torch's current stream.
            measured(lambda restored=restored, slots=slots: mpgpu.copy_blocks(cache, on_host, restored, slots)),
        )
        if number:
            # The first round loads the kernels, and is not counted.
            for values, value in zip(times.values(), round_times):
                values.append(value)
        for layer, place, (wanted, kept) in zip(cache, on_host, expected):
            wrong += not (torch.equal(layer.cpu(), wanted) and torch.equal(place, kept))
    for name, values in times.items():
        print(f"{name:22} {statistics.median(values) * 1e3:8.2f} ms   from {min(values) * 1e3:.2f} to {max(values) * 1e3:.2f} ms")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pages", type=int)
    parser.add_argument("--moved", type=int)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    is_virtual = mpgpu.default_context().backend == "host"
    if not is_virtual:
        try:
            import torch
        except ImportError:
            print("skipped: on GPUs this example needs torch; MPGPU_BACKEND=host runs it on virtual devices with NumPy")
            return 0
        if not torch.cuda.is_available():
            print("skipped: this torch sees no GPU; MPGPU_BACKEND=host runs it on virtual devices with NumPy")
            return 0
    options.pages = options.pages or (32 if is_virtual else 512)
    options.moved = min(options.moved or options.pages // 4, options.pages)
    # Keys and values, 16 bits each.
    shape = (options.pages, 2, TOKENS, options.heads, options.head_dim)
    page = 2 * TOKENS * options.heads * options.head_dim * 2
    moved = options.layers * options.moved
    print(f"{options.layers} layers of {options.pages} pages of {page / 1024:g} KiB; {moved} pages ({moved * page / 2**20:.0f} MiB) move")
    wrong = with_numpy(options, shape) if is_virtual else with_torch(options, shape)
    print("every byte right" if not wrong else f"{wrong} ARRAYS DIFFER")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
