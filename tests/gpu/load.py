#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures loading of weights from a safetensors file to a GPU. The methods are: unmodified safetensors, which since 0.8 reads each tensor
into pinned memory with one thread; mapping the file and moving tensors by `tensor.to`; both of these with libmpgpu_preload.so; and
mpgpu.torch.load. Also measures tensors in pageable memory that are moved by `tensor.to`, and the time to load a single tensor. Every tensor
is compared. Requires torch with CUDA and safetensors, but no compiler.

    python3 tests/gpu/load.py [--gib 8] [--folder FOLDER] [--preload libmpgpu_preload.so] [--cold]

FOLDER must have space for the file. With --cold, the file is removed from the page cache before each load. Each method runs in a separate
process, which creates its CUDA context before the measurement. The last line reports whether all tensors were right. Exits with 1 if not,
and with 77 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Shapes of the tensors in one layer of a model with 8e9 parameters.
SHAPES = [(4096, 14336), (14336, 4096), (4096, 4096), (1024, 4096), (4096,)]


def make(path: Path, gib: float) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    # Random data is generated once, and each tensor uses it from a different offset.
    pool = torch.randint(-(2**15), 2**15 - 1, (1 << 27,), dtype=torch.int16, generator=generator)
    tensors, total = {}, 0
    while total < gib * 2**30:
        shape = SHAPES[len(tensors) % len(SHAPES)]
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        at = 4099 * len(tensors) % (pool.numel() - count)
        tensors[f"layer.{len(tensors)}"] = pool[at : at + count].view(torch.bfloat16).reshape(shape).clone()
        total += 2 * count
    save_file(tensors, path)
    os.sync()


def forget(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(way: str, path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    if way == "mpgpu":
        import mpgpu.torch

        return mpgpu.torch.load(path, "cuda:0")
    if way == "file":
        return load_file(path, device="cuda:0")
    tensors = ordinary if way == "to" else load_file(path)
    return {name: tensor.to("cuda:0") for name, tensor in tensors.items()}


def load_one(way: str, path: Path, name: str) -> Any:
    """Loads a single tensor. Its time is the earliest time at which a program can use data of the file."""
    from safetensors import safe_open

    if way == "mpgpu":
        import mpgpu.torch

        return mpgpu.torch.load(path, {name: "cuda:0"})[name]
    if way == "to":
        return ordinary[name].to("cuda:0")
    with safe_open(path, framework="pt", device="cuda:0" if way == "file" else "cpu") as file:
        return file.get_tensor(name).to("cuda:0")


ordinary: dict[str, Any] = {}


def measure(way: str, path: Path, cold: bool) -> None:
    """Runs in a separate process.

    Prints the seconds of each load and of loading one tensor before it, and true if all tensors were right.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    torch.empty(1 << 20, device="cuda:0").zero_()
    torch.cuda.synchronize()
    if way == "mpgpu":
        import mpgpu

        mpgpu.default_context()
    if way == "to":
        ordinary.update({name: tensor.clone() for name, tensor in load_file(path).items()})
    with safe_open(path, framework="pt") as file:
        first = next(iter(file.keys()))
    seconds, first_seconds, right = [], [], True
    for _ in range(1 if cold else 4):
        if cold:
            forget(path)
        begin = time.monotonic()
        load_one(way, path, first)
        torch.cuda.synchronize()
        first_seconds.append(time.monotonic() - begin)
        if cold:
            forget(path)
        begin = time.monotonic()
        loaded = load(way, path)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - begin)
        with safe_open(path, framework="pt") as file:
            right = right and set(file.keys()) == set(loaded)
            for name in file.keys():
                right = right and torch.equal(loaded[name].cpu().view(torch.int16), file.get_tensor(name).view(torch.int16))
        del loaded
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    print(json.dumps({"seconds": seconds, "first_seconds": first_seconds, "right": right, "resident": resident}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--preload", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--way", choices=["file", "mapped", "to", "mpgpu"])
    parser.add_argument("--path", type=Path)
    given = parser.parse_args()
    if given.way:
        measure(given.way, given.path, given.cold)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu load: skipped: torch sees no GPU")
        return 77
    print(torch.cuda.get_device_name(0), f"x{torch.cuda.device_count()}, torch {torch.__version__}")
    wrong = 0
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "model.safetensors"
        make(path, given.gib)
        size = path.stat().st_size
        ways = [("load_file to the GPU", "file", {}), ("load_file, tensor.to", "mapped", {}), ("mpgpu.torch.load", "mpgpu", {})]
        if not given.cold:
            ways.insert(0, ("tensor.to", "to", {}))
        if given.preload:
            under = {"LD_PRELOAD": str(given.preload.resolve()), "MPGPU_PRELOAD_GPUS": "all", "MPGPU_PRELOAD_REPORT": "stderr"}
            one = {**under, "MPGPU_PRELOAD_GPUS": "0"}
            for name, way, _ in [way for way in ways if way[1] != "mpgpu"]:
                ways += [(f"{name}, preloaded, one link", way, one), (f"{name}, preloaded, all links", way, under)]
        for name, way, environment in ways:
            command = [sys.executable, __file__, "--way", way, "--path", str(path), *(["--cold"] if given.cold else [])]
            done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, timeout=200)
            if done.returncode != 0:
                print(f"{name:50} FAILED with {done.returncode}")
                wrong += 1
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            wrong += not found["right"]
            rates = " ".join(f"{size / each * 1e-9:6.1f}" for each in found["seconds"])
            print(
                f"{name:50} GB/s {rates}  {'right' if found['right'] else 'WRONG'}, {found['resident'] / 2**30:.1f} GiB resident,",
                "one tensor alone " + " ".join(f"{each * 1e3:.1f}" for each in found["first_seconds"]) + " ms",
                flush=True,
            )
    print("gpu load: every tensor was right" if not wrong else f"gpu load: {wrong} ways FAILED")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
