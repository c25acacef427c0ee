#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests loading and saving of safetensors files on GPUs: every option of mpgpu.torch.load, mpgpu.torch.iter_load and mpgpu.torch.save.

    python3 tests/gpu/load_cases.py [--device cuda:0]

tests/gpu/load.py runs these cases before it measures. With `--device cpu` and MPGPU_BACKEND=host, they run without a GPU. Requires torch
and safetensors. Prints one line per case; exits with 1 if one failed, and with 77 if there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

Tensors = dict[str, Any]


class Case:
    """Folder, device and tensors of a case."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch

        self.folder, self.device = folder, device
        self.on_gpu = device != "cpu"
        self.devices = [f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())] if self.on_gpu else ["cpu", "cpu"]
        generator = torch.Generator().manual_seed(3)
        types = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16, torch.bool]
        self.tensors: Tensors = {}
        for at in range(3000):
            count = 1 << (at % 15)
            self.tensors[f"small.{at:05}"] = torch.randint(0, 100, (count + at % 3,), generator=generator).to(types[at % len(types)])
        for at in range(6):
            self.tensors[f"large.{at}"] = torch.randn(1 << 20 << at % 4, generator=generator)
        self.tensors["empty"] = torch.empty(0, 7)
        self.tensors["scalar"] = torch.tensor(2.5)

    def moved(self) -> Tensors:
        return {name: tensor.to(self.devices[at % len(self.devices)]) for at, (name, tensor) in enumerate(self.tensors.items())}

    def synchronize(self) -> None:
        import torch

        if self.on_gpu:
            for device in self.devices:
                torch.cuda.synchronize(device)


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    import torch

    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:3]
    for name, tensor in expected.items():
        own, other = found[name].cpu(), tensor.cpu()
        assert own.dtype == other.dtype and own.shape == other.shape, name
        assert torch.equal(own.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)), name


def saved_as_by_safetensors(case: Case) -> None:
    import mpgpu.torch
    from safetensors.torch import save_file

    ours, theirs = case.folder / "ours", case.folder / "theirs"
    save_file(case.tensors, theirs, metadata={"format": "pt"})
    mpgpu.torch.save(case.moved(), ours, metadata={"format": "pt"})
    assert ours.read_bytes() == theirs.read_bytes()
    mpgpu.torch.save(case.moved(), ours, metadata={"format": "pt"}, wait=False).wait()
    assert ours.read_bytes() == theirs.read_bytes()


def saved_after_earlier_work_and_before_later_work(case: Case) -> None:
    """Tensors are computed directly before the save, and overwritten directly after it."""
    import mpgpu.torch
    import torch

    for wait in (True, False):
        tensors = case.moved()
        for _ in range(20):
            for name in tensors:
                if name.startswith("large"):
                    tensors[name].mul_(1.25)
        expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        for name in tensors:
            if name.startswith("large"):
                tensors[name].mul_(2).mul_(0.5)
        pending = mpgpu.torch.save(tensors, case.folder / "file", wait=wait)
        for tensor in tensors.values():
            torch.Tensor.zero_(tensor)
        if pending is not None:
            pending.wait()
        same(mpgpu.torch.load(case.folder / "file", case.device), expected)


def saved_with_strides(case: Case) -> None:
    import mpgpu.torch
    import torch

    base = torch.randn(700, 900, device=case.device)
    tensors = {"t": base.t(), "columns": base[:, ::3], "expanded": base[:1].expand(50, 900), "same": base, "again": base}
    mpgpu.torch.save(tensors, case.folder / "file")
    same(mpgpu.torch.load(case.folder / "file", case.device), tensors)


def loaded_to_one_and_to_several_devices(case: Case) -> None:
    import mpgpu.torch

    path = case.folder / "file"
    mpgpu.torch.save(case.tensors, path)
    same(mpgpu.torch.load(path, case.device), case.tensors)
    for each, device in zip(mpgpu.torch.load(path, [*case.devices, "cpu"]), [*case.devices, "cpu"]):
        same(each, case.tensors)
        assert all(str(tensor.device) == device for tensor in each.values())
    names = list(case.tensors)
    places = {name: case.devices[at // 100 % len(case.devices)] for at, name in enumerate(names)}
    loaded = mpgpu.torch.load(path, places)
    same(loaded, case.tensors)
    assert all(str(loaded[name].device) == device for name, device in places.items())


def loaded_from_several_files(case: Case) -> None:
    import mpgpu.torch

    folder = case.folder / "model"
    folder.mkdir()
    names = list(case.tensors)
    for shard in range(4):
        mpgpu.torch.save({name: case.tensors[name] for name in names[shard::4]}, folder / f"{shard}.safetensors")
    same(mpgpu.torch.load(folder, case.device), case.tensors)
    same(dict(mpgpu.torch.iter_load(folder, case.device)), case.tensors)


def loaded_with_options(case: Case) -> None:
    import mpgpu.torch
    import torch

    path = case.folder / "file"
    mpgpu.torch.save(case.tensors, path)
    same(
        mpgpu.torch.load(path, case.device, select=["small.*1", "scalar"]),
        {name: each for name, each in case.tensors.items() if name == "scalar" or (name[0] == "s" and name[-1] == "1")},
    )
    for dtype in (torch.bfloat16, torch.float64):
        converted = {name: each.to(dtype) if each.is_floating_point() else each for name, each in case.tensors.items()}
        same(mpgpu.torch.load(path, case.device, dtype=dtype), converted)
        same(dict(mpgpu.torch.iter_load(path, case.device, dtype=dtype)), converted)
    into = {name: torch.zeros_like(tensor) for name, tensor in case.moved().items()}
    loaded = mpgpu.torch.load(path, into=into)
    assert all(loaded[name] is into[name] for name in into)
    same(into, case.tensors)


def loaded_in_the_current_stream(case: Case) -> None:
    """Memory that torch has freed in another stream is used again while that stream is busy. Later work sees the loaded data."""
    import mpgpu.torch
    import torch

    path = case.folder / "file"
    mpgpu.torch.save(case.tensors, path)
    if not case.on_gpu:
        return
    stream = torch.cuda.Stream(case.device)
    for _ in range(5):
        with torch.cuda.stream(stream):
            busy = torch.randn(4096, 4096, device=case.device)
            freed = [torch.empty(1 << 20, device=case.device) for _ in range(50)]
            for _ in range(10):
                busy = busy @ busy * 1e-4
            for each in freed:
                each.fill_(7)
            del freed
            loaded = mpgpu.torch.load(path, case.device)
            copied = {name: tensor.clone() for name, tensor in loaded.items()}
        stream.synchronize()
        same(copied, case.tensors)
        del loaded, copied


def peak_of_a_conversion_is_bounded(case: Case) -> None:
    import mpgpu._load
    import mpgpu.torch
    import torch

    if not case.on_gpu:
        return
    path = case.folder / "file"
    mpgpu.torch.save({f"{at:02}": torch.ones(1 << 24) for at in range(32)}, path)
    usual = mpgpu._load._SHORT_BATCH
    mpgpu._load._SHORT_BATCH = 128 << 20
    try:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(case.device)
        before = torch.cuda.memory_allocated(case.device)
        loaded = mpgpu.torch.load(path, case.device, dtype=torch.bfloat16)
        peak = torch.cuda.max_memory_allocated(case.device) - before
    finally:
        mpgpu._load._SHORT_BATCH = usual
    assert all(bool((each == 1).all()) for each in loaded.values())
    # The converted model has 1 GiB, and each of two batches 128 MiB.
    assert peak <= (1 << 30) + (300 << 20), peak


def written_files_are_refused(case: Case) -> None:
    import mpgpu
    import mpgpu._load
    import mpgpu.torch

    path = case.folder / "file"
    mpgpu.torch.save(case.tensors, path)
    usual = mpgpu._load.Filler.fill

    def shortened(*arguments: Any) -> None:
        os.truncate(path, path.stat().st_size - 1)
        usual(*arguments)

    mpgpu._load.Filler.fill = shortened  # type: ignore[method-assign]
    try:
        mpgpu.torch.load(path, case.device)
        raise AssertionError("a file that was shortened is loaded")
    except mpgpu.ArgumentError as error:
        assert "was truncated" in str(error), error
    finally:
        mpgpu._load.Filler.fill = usual  # type: ignore[method-assign]


def many_small_tensors(case: Case) -> None:
    import mpgpu.torch
    import torch
    from safetensors.torch import load_file

    path = case.folder / "file"
    generator = torch.Generator().manual_seed(9)
    sizes = (2 ** (torch.rand(100_000, generator=generator) * 14)).long().tolist()
    tensors = {f"{at:06}": torch.full((size,), at, dtype=torch.int32) for at, size in enumerate(sizes)}
    mpgpu.torch.save(tensors, path)
    seconds = {}
    for name, load in (("mpgpu", mpgpu.torch.load), ("load_file", load_file)):
        begin = time.perf_counter()
        loaded = load(path, case.device) if name == "mpgpu" else load(path, device=case.device)
        case.synchronize()
        seconds[name] = time.perf_counter() - begin
        same(loaded, tensors)
        del loaded
    print(f"  100,000 tensors: mpgpu {seconds['mpgpu']:.2f} s, load_file {seconds['load_file']:.2f} s")
    on_gpu = {name: tensor.to(case.device) for name, tensor in tensors.items()}
    begin = time.perf_counter()
    mpgpu.torch.save(on_gpu, path)
    print(f"  100,000 tensors: save {time.perf_counter() - begin:.2f} s")
    same(mpgpu.torch.load(path, "cpu"), tensors)


CASES: list[Callable[[Case], None]] = [
    saved_as_by_safetensors,
    saved_after_earlier_work_and_before_later_work,
    saved_with_strides,
    loaded_to_one_and_to_several_devices,
    loaded_from_several_files,
    loaded_with_options,
    loaded_in_the_current_stream,
    peak_of_a_conversion_is_bounded,
    written_files_are_refused,
    many_small_tensors,
]


def run(folder: Path | None, device: str) -> int:
    """Runs all cases and returns the number of those that failed."""
    failed = 0
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            try:
                case(Case(Path(own), device))
                print(f"{case.__name__.replace('_', ' ')}: right", flush=True)
            except Exception:
                failed += 1
                print(f"{case.__name__.replace('_', ' ')}: FAILED\n{traceback.format_exc()}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    import torch

    if given.device != "cpu" and not torch.cuda.is_available():
        print("gpu load cases: skipped: torch sees no GPU")
        return 77
    failed = run(None, given.device)
    print("gpu load cases: all right" if not failed else f"gpu load cases: {failed} FAILED")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
