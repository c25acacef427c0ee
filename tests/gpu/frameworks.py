#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures unmodified programs of torch, JAX, CuPy, transformers and accelerate that copy pageable memory, without and with `mpgpu run`.

    python3 tests/gpu/frameworks.py [--mpgpu COMMAND] [--mib 512] [--case NAME]...

COMMAND runs mpgpu; by default, it is `mpgpu`, or `python3 -m mpgpu` if `mpgpu` is not in PATH. Each case runs in two processes of its own,
one without and one with `mpgpu run`. Each process compares all bytes after the measurement. For each case, this program prints three rates:
of the first execution, of an execution of median time, and of all executions together. A case is skipped if its framework is missing. Exits
with 1 if a byte was wrong or a case failed, and with 77 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMES = 10
# Number of lines of the report of `mpgpu run` that are printed.
REPORT_LINES = 8
Result = tuple[int, list[float], bool]
"""Number of bytes that one execution copies, the seconds of each execution, and true if all bytes were right."""


def timed(times: int, execute: Callable[[], Any]) -> tuple[list[float], Any]:
    """Returns the seconds of each execution, and the result of the last one."""
    seconds, result = [], None
    for _ in range(times):
        del result
        begin = time.perf_counter()
        result = execute()
        seconds.append(time.perf_counter() - begin)
    return seconds, result


def torch_to(size: int, folder: Path) -> Result:
    import torch

    torch.cuda.init()
    host = torch.randint(0, 255, (size,), dtype=torch.uint8)
    seconds, moved = timed(TIMES, lambda: host.to("cuda"))
    return size, seconds, torch.equal(moved.cpu(), host)


def torch_cpu(size: int, folder: Path) -> Result:
    """Copies a tensor into host memory whose pages are present."""
    import torch

    moved = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    host = torch.zeros(size, dtype=torch.uint8)
    seconds, _ = timed(TIMES, lambda: host.copy_(moved))
    return size, seconds, torch.equal(moved, host.to("cuda"))


def torch_cpu_fresh(size: int, folder: Path) -> Result:
    """Copies a tensor into new host memory, whose pages are not present yet."""
    import torch

    moved = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    seconds, host = timed(TIMES, lambda: moved.cpu())
    return size, seconds, torch.equal(moved, host.to("cuda"))


def jax_device_put(size: int, folder: Path) -> Result:
    import jax
    import numpy

    host = numpy.random.default_rng(1).integers(0, 255, size, dtype=numpy.uint8)
    gpu = jax.devices("gpu")[0]
    jax.device_put(host[:1024], gpu).block_until_ready()
    seconds, moved = timed(TIMES, lambda: jax.device_put(host, gpu).block_until_ready())
    return size, seconds, bool((numpy.asarray(moved) == host).all())


def cupy_asarray(size: int, folder: Path) -> Result:
    import cupy
    import numpy

    host = numpy.random.default_rng(1).integers(0, 255, size, dtype=numpy.uint8)
    cupy.asarray(host[:1024])

    def execute() -> Any:
        moved = cupy.asarray(host)
        cupy.cuda.Device().synchronize()
        return moved

    seconds, moved = timed(TIMES, execute)
    return size, seconds, bool((cupy.asnumpy(moved) == host).all())


def make_model(folder: Path) -> None:
    """Saves a model of random weights in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=16, vocab_size=32000)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="800MB")


def weights_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def from_pretrained(size: int, folder: Path) -> Result:
    import torch
    from transformers import AutoModelForCausalLM

    torch.empty(1, device="cuda")

    def execute() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda:0")
        torch.cuda.synchronize()
        return model

    seconds, model = timed(3, execute)
    expected, found = weights_of(folder), model.state_dict()
    right = all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())
    return sum(tensor.nbytes for tensor in expected.values()), seconds, right


def cpu_offload(size: int, folder: Path) -> Result:
    """Executes a model whose weights are in pageable memory and are moved to the GPU before each layer."""
    import accelerate
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(16, device="cuda").reshape(1, 16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda:0")(tokens).logits
        accelerate.cpu_offload(model, execution_device=torch.device("cuda:0"))

        def execute() -> Any:
            logits = model(tokens).logits
            torch.cuda.synchronize()
            return logits

        seconds, logits = timed(5, execute)
    return whole, seconds, torch.equal(logits, expected)


CASES: dict[str, tuple[str, Callable[[int, Path], Result]]] = {
    "torch_to": ("torch", torch_to),
    "torch_cpu": ("torch", torch_cpu),
    "torch_cpu_fresh": ("torch", torch_cpu_fresh),
    "jax_device_put": ("jax", jax_device_put),
    "cupy_asarray": ("cupy", cupy_asarray),
    "from_pretrained": ("transformers", from_pretrained),
    "cpu_offload": ("accelerate", cpu_offload),
}


def measured(command: list[str]) -> tuple[Result, list[str]] | str:
    """Runs a case in a separate process. Returns its result and the last lines that it has written to its standard error stream, or the
    reason why there is no result.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired:
        return "did not end within 200 s"
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return f"exit status {done.returncode}: {' '.join(done.stderr.strip().splitlines()[-1:])[-200:]}"
    size, seconds, right = json.loads(lines[-1])
    return (size, seconds, right), done.stderr.strip().splitlines()[-REPORT_LINES:]


def compare(name: str, own: list[str], with_mpgpu: list[str]) -> bool:
    """Runs a case without and with mpgpu, and prints its rates and the report of mpgpu. Returns true if all bytes were right."""
    rates: list[tuple[float, float, float]] = []
    report: list[str] = []
    for command in (own, with_mpgpu):
        result = measured(command)
        if isinstance(result, str):
            print(f"{name:16} FAILED {'with' if command is with_mpgpu else 'without'} mpgpu: {result}", flush=True)
            return False
        (size, seconds, right), report = result
        if not right:
            print(f"{name:16} WRONG bytes {'with' if command is with_mpgpu else 'without'} mpgpu", flush=True)
            return False
        rates.append((size / seconds[0] * 1e-9, size / statistics.median(seconds) * 1e-9, size * len(seconds) / sum(seconds) * 1e-9))
    without, having = rates
    cells = [f"{what} {a:5.1f} {b:5.1f} ({b / a:4.2f})" for what, a, b in zip(("first", "median", "all"), without, having)]
    print(f"{name:16} GB/s without, with, gain: {'; '.join(cells)}; right", flush=True)
    print(*(f"    {line}" for line in report), sep="\n", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpgpu")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--run", choices=[*CASES, "make"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run == "make":
        make_model(given.folder)
        return 0
    if given.run:
        print(json.dumps(CASES[given.run][1](given.mib << 20, given.folder)))
        return 0
    if subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True).returncode != 0:
        print("gpu frameworks: skipped: no NVIDIA GPU on this machine")
        return 77
    mpgpu = given.mpgpu.split() if given.mpgpu else ["mpgpu"] if shutil.which("mpgpu") else [sys.executable, "-m", "mpgpu"]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        needs_model = {"from_pretrained", "cpu_offload"}
        if needs_model & set(given.case or CASES) and importlib.util.find_spec("transformers"):
            subprocess.run([sys.executable, __file__, "--run", "make", "--folder", folder], check=True, capture_output=True)
        for name in given.case or CASES:
            if importlib.util.find_spec(CASES[name][0]) is None:
                print(f"{name:16} skipped: {CASES[name][0]} is not installed")
                continue
            own = [sys.executable, __file__, "--run", name, "--mib", str(given.mib), "--folder", folder]
            failed += not compare(name, own, [*mpgpu, "run", "--", *own])
    print("gpu frameworks: everything was right" if not failed else f"gpu frameworks: {failed} cases FAILED")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
