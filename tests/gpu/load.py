#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests loading and saving of safetensors files on GPUs (load_cases.py), and measures both. Requires torch with CUDA and safetensors, but
no compiler.

    python3 tests/gpu/load.py [--gib 8] [--folder FOLDER] [--preload libmpgpu_preload.so] [--cold] [--skip-cases]

The methods to load are: unmodified safetensors, which since 0.8 reads each tensor into pinned memory with one thread; mapping the file and
moving tensors by `tensor.to`; both of these with libmpgpu_preload.so; mpgpu.torch.load; and InstantTensor and fastsafetensors if they are
installed. Also measures tensors in pageable memory that are moved by `tensor.to`, and the time to load a single tensor. Every tensor is
compared. The methods to save are save_file of safetensors, without and with a sync of the file, mpgpu.torch.save, and the time until
mpgpu.torch.save with `wait=False` returns. Every file is compared.

FOLDER must have space for two files. With --cold, the file is removed from the page cache before each load. Each method runs in a separate
process, which creates its CUDA context before the measurement, and runs four times: compare the first and the third. The last line reports
whether everything was right. Exits with 1 if not, and with 77 if there is no GPU.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Packages that load whole files to a GPU.
OTHERS = ["instanttensor", "fastsafetensors"]
# Ways to save.
SAVING = {
    "save_file": "save_file",
    "synced": "save_file, synced",
    "mpgpu": "mpgpu.torch.save, synced",
    "mpgpu pending": "mpgpu.torch.save until the return",
}
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
    if way == "instanttensor":
        from instanttensor import safe_open

        with safe_open(path, framework="pt", device=0) as file:
            return dict(file.tensors())
    if way == "fastsafetensors":
        return load_fast(path)
    tensors = ordinary if way == "to" else load_file(path)
    return {name: tensor.to("cuda:0") for name, tensor in tensors.items()}


def load_fast(path: Path) -> dict[str, Any]:
    """Loads a file by fastsafetensors without GPUDirect Storage. Its tensors are parts of its own memory, so they are copied."""
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"), nogds=True)
    loader.add_filenames({0: [str(path)]})
    loaded = loader.copy_files_to_device()
    tensors = {name: loaded.get_tensor(name).clone() for name in list(loaded.key_to_rank_lidx)}
    loaded.close()
    loader.close()
    return tensors


def save(way: str, tensors: dict[str, Any], path: Path) -> Any:
    """Saves tensors. Returns an object to wait for, or ``None``."""
    from safetensors.torch import save_file

    if way.startswith("mpgpu"):
        import mpgpu.torch

        return mpgpu.torch.save(tensors, path, wait=way == "mpgpu")
    save_file(tensors, path)
    if way == "synced":
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return None


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


def begin_process(way: str, path: Path) -> None:
    """Creates the contexts that a method needs, and the tensors that `tensor.to` moves."""
    import torch
    from safetensors.torch import load_file

    torch.empty(1 << 20, device="cuda:0").zero_()
    torch.cuda.synchronize()
    if way.startswith("mpgpu"):
        import mpgpu

        mpgpu.default_context()
    if way == "to":
        ordinary.update({name: tensor.clone() for name, tensor in load_file(path).items()})


def measure_one(way: str, path: Path, cold: bool) -> None:
    """Runs in a separate process. Prints the seconds of each load of a single tensor, and true if it was right."""
    import torch
    from safetensors import safe_open

    begin_process(way, path)
    with safe_open(path, framework="pt") as file:
        name = next(iter(file.keys()))
        expected = file.get_tensor(name).clone().view(torch.int16)
    seconds, right = [], True
    for _ in range(1 if cold else 4):
        if cold:
            forget(path)
        begin = time.monotonic()
        loaded = load_one(way, path, name)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - begin)
        right = right and torch.equal(loaded.cpu().view(torch.int16), expected)
    print(json.dumps({"seconds": seconds, "right": right}))


def measure(way: str, path: Path, cold: bool) -> None:
    """Runs in a separate process. Prints the seconds of each load, and true if all tensors were right."""
    import torch
    from safetensors import safe_open

    begin_process(way, path)
    seconds, right = [], True
    for _ in range(1 if cold else 4):
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
    print(json.dumps({"seconds": seconds, "right": right, "resident": resident}))


def measure_save(way: str, path: Path) -> None:
    """Runs in a separate process. Prints the seconds of each save, and true if all files were right."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path, device="cuda:0")
    torch.cuda.synchronize()
    target = path.with_name("saved.safetensors")
    begin_process(way, path)
    seconds, right = [], True
    for _ in range(4):
        begin = time.monotonic()
        pending = save(way, tensors, target)
        seconds.append(time.monotonic() - begin)
        if pending is not None:
            pending.wait()
        right = right and filecmp.cmp(path, target, shallow=False)
        target.unlink()
        os.sync()
    print(json.dumps({"seconds": seconds, "right": right}))


def report(name: str, options: list[str], environment: dict[str, str], size: int) -> bool:
    """Runs a method in a separate process and prints its rates, or its times if ``size`` is 0. Returns true if all tensors were right."""
    command = [sys.executable, __file__, *options]
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, timeout=200)
    except subprocess.TimeoutExpired:
        print(f"{name:50} FAILED: more than 200 s")
        return False
    if done.returncode != 0:
        print(f"{name:50} FAILED with {done.returncode}")
        return False
    found = json.loads(done.stdout.splitlines()[-1])
    if size:
        rates = "GB/s " + " ".join(f"{size / each * 1e-9:6.1f}" for each in found["seconds"])
    else:
        rates = "one tensor alone, ms " + " ".join(f"{each * 1e3:.1f}" for each in found["seconds"])
    more = f", {found['resident'] / 2**30:.1f} GiB resident" if "resident" in found else ""
    print(f"{name:50} {rates}  {'right' if found['right'] else 'WRONG'}{more}", flush=True)
    return bool(found["right"])


def ways_of(cold: bool, preload: Path | None) -> list[tuple[str, str, dict[str, str]]]:
    """Returns the methods to load: name, way, and variables of the environment."""
    ways: list[tuple[str, str, dict[str, str]]] = []
    if not cold:
        ways.append(("tensor.to", "to", {}))
    ways += [("load_file to the GPU", "file", {}), ("load_file, tensor.to", "mapped", {}), ("mpgpu.torch.load", "mpgpu", {})]
    if preload:
        under = {"LD_PRELOAD": str(preload.resolve()), "MPGPU_PRELOAD_GPUS": "all", "MPGPU_PRELOAD_REPORT": "stderr"}
        one = {**under, "MPGPU_PRELOAD_GPUS": "0"}
        for name, way, _ in [way for way in ways if way[1] != "mpgpu"]:
            ways += [(f"{name}, preloaded, one link", way, one), (f"{name}, preloaded, all links", way, under)]
    for package in OTHERS:
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed")
        else:
            ways.append((package, package, {}))
    return ways


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--preload", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--skip-cases", action="store_true")
    parser.add_argument("--way", choices=["file", "mapped", "to", "mpgpu", *OTHERS])
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--save", choices=list(SAVING))
    parser.add_argument("--path", type=Path)
    given = parser.parse_args()
    if given.way:
        (measure_one if given.one else measure)(given.way, given.path, given.cold)
        return 0
    if given.save:
        measure_save(given.save, given.path)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu load: skipped: torch sees no GPU")
        return 77
    print(torch.cuda.get_device_name(0), f"x{torch.cuda.device_count()}, torch {torch.__version__}")
    wrong = 0
    if not given.skip_cases:
        # The cases run in a process of their own, so that their memory is free afterwards.
        wrong += subprocess.run([sys.executable, str(Path(__file__).with_name("load_cases.py"))]).returncode != 0
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "model.safetensors"
        make(path, given.gib)
        size = path.stat().st_size
        for name, way, environment in ways_of(given.cold, given.preload):
            options = ["--way", way, "--path", str(path), *(["--cold"] if given.cold else [])]
            wrong += not report(name, options, environment, size)
            if way not in OTHERS:
                wrong += not report(name, [*options, "--one"], environment, 0)
        for way, name in SAVING.items():
            wrong += not report(name, ["--save", way, "--path", str(path)], {}, size)
    print("gpu load: everything was right" if not wrong else f"gpu load: {wrong} ways FAILED")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
