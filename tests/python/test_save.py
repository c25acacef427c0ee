# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests mpgpu.torch.save on the CPU and on virtual GPUs; tests/gpu/load.py tests it on GPUs."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading

import mpgpu
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402
from mpgpu._safetensors import TORCH_TYPES  # noqa: E402
from virtual_gpus import VirtualGpus  # noqa: E402

TYPES = [getattr(torch, name) for name in TORCH_TYPES.values() if hasattr(torch, name)]


@pytest.fixture
def gpus(monkeypatch):
    return VirtualGpus(monkeypatch)


def random_tensor(chance, generator, dtype, elements=200):
    # Tensors of elements of four bits have dimensions.
    fewest = 1 if str(dtype).startswith("torch.float4") else 0
    shape = [chance.choice([0, 1, 2, 3, 7, elements // 7]) for _ in range(chance.randint(fewest, 3))]
    count = 1
    for extent in shape:
        count *= extent
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data %= 2
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def random_tree(seed, elements=200):
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = {}
    for at in range(chance.choice([0, 1, 5, 60])):
        name = "".join(chance.choice('ab.ÄÖ漢😀"\\\n\x01\x7f/ ') for _ in range(chance.randint(0, 4))) + str(at)
        tensors[name] = random_tensor(chance, generator, chance.choice(TYPES), elements)
    return tensors


def assert_loaded(path, tensors):
    loaded = mpgpu.torch.load(path, "cpu")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def rest(folder):
    """Returns the names of temporary files."""
    return [name for name in os.listdir(folder) if name.startswith(".mpgpu")]


# --- contents ---------------------------------------------------------------------------------------------------------------
def test_a_file_is_equal_to_that_of_safetensors_for_every_type(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    chance, generator = random.Random(1), torch.Generator().manual_seed(1)
    tensors = {f"{at}": random_tensor(chance, generator, dtype) for at, dtype in enumerate(TYPES * 3)}
    for some in (tensors, *({name: tensor} for name, tensor in tensors.items()), {}):
        # Without tensors and with empty metadata, safetensors writes a header that is not JSON.
        for metadata in (None, {}, {"format": 'pt "ä\n'}) if some else (None, {"format": "pt"}):
            safetensors.save_file(some, tmp_path / "theirs", metadata=metadata)
            mpgpu.torch.save(some, tmp_path / "ours", metadata=metadata)
            assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("seed", range(12))
def test_random_tensors_are_saved_as_by_safetensors_and_loaded_again(tmp_path, seed, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    tensors, path = random_tree(seed), tmp_path / "ours"
    safetensors.save_file(tensors, tmp_path / "theirs")
    expected = (tmp_path / "theirs").read_bytes()
    for window, step in [(256 << 20, 16 << 20), (1 << 10, 1 << 8), (1000, 7)]:
        monkeypatch.setattr(mpgpu._save, "_WINDOW", window)
        monkeypatch.setattr(mpgpu._new_file, "_TASK_BYTES", step)
        mpgpu.torch.save(tensors, path)
        assert path.read_bytes() == expected
        mpgpu.torch.save(tensors, path, wait=False).wait()
        assert path.read_bytes() == expected
    assert_loaded(path, tensors)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("small", [0, 1 << 8, 1 << 20])
def test_tensors_of_gpus_are_saved_through_pinned_memory(tmp_path, gpus, monkeypatch, seed, small):
    tensors, chance, path = random_tree(seed, 3000), random.Random(seed), tmp_path / "file"
    tensors["large"] = torch.arange(5000)
    moved = {name: gpus.moved(tensor, chance.choice(["cuda:0", "cuda:1", "cpu"])) for name, tensor in tensors.items()}
    monkeypatch.setattr(mpgpu._save, "_SMALL", small)
    for window in (256 << 20, 1 << 12):
        monkeypatch.setattr(mpgpu._save, "_WINDOW", window)
        mpgpu.torch.save(moved, path)
        assert_loaded(path, tensors)
        mpgpu.torch.save(moved, path, wait=False).wait()
        assert_loaded(path, tensors)


def test_pinned_memory_is_bounded(tmp_path, gpus, monkeypatch):
    sizes = []

    class Counted(mpgpu.Buffer):
        __slots__ = ()

        def __init__(self, nbytes, **options):
            sizes.append(nbytes)
            super().__init__(nbytes, **options)

    monkeypatch.setattr(mpgpu._save, "_WINDOW", 1 << 12)
    moved = {f"{at}": gpus.moved(torch.full((1000,), at), "cuda:0") for at in range(20)}
    monkeypatch.setattr(mpgpu._save, "Buffer", Counted)
    mpgpu.torch.save(moved, tmp_path / "file")
    assert sizes == [1 << 12] * 2
    # Tensors on the CPU are written from their own memory.
    mpgpu.torch.save({"a": torch.arange(5000)}, tmp_path / "file")
    assert sizes == [1 << 12] * 2


def test_strides_conjugates_shared_memory_and_parameters_are_saved_by_value(tmp_path):
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    numbers = torch.view_as_complex(torch.randn(5, 2))
    tensors = {
        "t": base.t(),
        "slice": base[:, 1:5:2],
        "expanded": base[0].expand(3, 6),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "one": base,
        "two": base,
        "parameter": torch.nn.Parameter(base[1]),
        "scalar": torch.tensor(3.5),
    }
    for options in ({}, {"wait": False}):
        pending = mpgpu.torch.save(tensors, tmp_path / "file", **options)
        if pending is not None:
            pending.wait()
        loaded = mpgpu.torch.load(tmp_path / "file", "cpu")
        assert all(torch.equal(loaded[name], tensor.detach().resolve_conj().resolve_neg()) for name, tensor in tensors.items())


def test_metadata_are_stored(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    metadata = {"format": "pt", "ключ": "значение", "step": "1000"}
    mpgpu.torch.save({"a": torch.zeros(1)}, tmp_path / "file", metadata=metadata)
    with safetensors.safe_open(tmp_path / "file", "pt") as opened:
        assert opened.metadata() == metadata
    mpgpu.torch.load(tmp_path / "file", "cpu")


# --- files ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0])
def test_permissions_are_those_of_a_new_file(tmp_path, umask):
    path = tmp_path / "file"
    before = os.umask(umask)
    try:
        for _ in range(2):
            mpgpu.torch.save({"a": torch.zeros(1)}, path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    finally:
        os.umask(before)
    assert rest(tmp_path) == []


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "file", tmp_path / "link"
    os.symlink("data/file", link)
    for value in (1, 2):
        mpgpu.torch.save({"a": torch.tensor(value)}, link)
        assert link.is_symlink() and mpgpu.torch.load(target, "cpu")["a"] == value
    assert os.listdir(tmp_path / "data") == ["file"]


def test_names_of_files_may_be_any_bytes_and_of_any_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("file", b"w\xff", "x" * 255, os.fsdecode(tmp_path / "y")):
        mpgpu.torch.save({"a": torch.ones(2)}, path)
        assert mpgpu.torch.load(path, "cpu")["a"].tolist() == [1, 1]
    assert rest(tmp_path) == []


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_folder_after(tmp_path, monkeypatch):
    calls, path = [], tmp_path / "file"
    for name in ("fsync", "replace", "pwritev"):
        usual = getattr(os, name)

        def logged(*arguments, name=name, usual=usual):
            what = "folder" if name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode) else ""
            calls.append(name + what)
            return usual(*arguments)

        monkeypatch.setattr(os, name, logged)
    mpgpu.torch.save({"a": torch.ones(2)}, path)
    assert calls == ["pwritev", "pwritev", "fsync", "replace", "fsyncfolder"]


def test_a_file_that_is_mapped_stays_as_it_was(tmp_path):
    path = tmp_path / "file"
    mpgpu.torch.save({"a": torch.ones(100)}, path)
    with mpgpu._safetensors.open_file(path) as file:
        before = file.read()
        mpgpu.torch.save({"a": torch.zeros(100)}, path)
        file.seek(0)
        assert file.read() == before


# --- wait=False -------------------------------------------------------------------------------------------------------------
class Held:
    """Holds all writes until :meth:`open`."""

    def __init__(self, monkeypatch):
        self.opened, self.begun = threading.Event(), threading.Event()
        write = os.pwritev

        def held(*arguments):
            self.begun.set()
            # The time limit lets a test fail that does not open the gate.
            self.opened.wait(60)
            return write(*arguments)

        monkeypatch.setattr(os, "pwritev", held)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_tensors_may_be_changed_while_threads_write(tmp_path, gpus, monkeypatch, device):
    held, path = Held(monkeypatch), tmp_path / "file"
    tensors = {"large": gpus.moved(torch.arange(1 << 18), device), "small": gpus.moved(torch.arange(3), device)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    pending = mpgpu.torch.save(tensors, path, wait=False)
    for tensor in tensors.values():
        tensor.zero_()
    assert held.begun.wait(60)
    assert not pending.done() and not path.exists() and "in progress" in repr(pending)
    held.opened.set()
    pending.wait()
    assert pending.done() and "finished" in repr(pending)
    pending.wait()
    assert_loaded(path, expected)
    assert rest(tmp_path) == []


def test_pinned_memory_is_released_when_a_save_has_finished(tmp_path, context):
    before = context.device_statistics(mpgpu.HOST).allocated_bytes
    pending = mpgpu.torch.save({"a": torch.ones(1 << 20)}, tmp_path / "file", wait=False)
    pending.wait()
    assert context.device_statistics(mpgpu.HOST).allocated_bytes == before


def test_a_dropped_save_is_completed(tmp_path, monkeypatch):
    held, path = Held(monkeypatch), tmp_path / "file"
    mpgpu.torch.save({"a": torch.ones(5)}, path, wait=False)
    threads = [each for each in threading.enumerate() if each.name == "mpgpu-save"]
    held.opened.set()
    for each in threads:
        each.join()
    assert len(threads) == 1
    assert_loaded(path, {"a": torch.ones(5)})


def test_the_interpreter_completes_saves_before_it_ends(tmp_path):
    program = """
import sys, torch, mpgpu.torch
for at in range(3):
    mpgpu.torch.save({"a": torch.full((1 << 22,), at)}, sys.argv[1] + str(at), wait=False)
print("end")
"""
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
    assert sorted(os.listdir(tmp_path)) == ["file0", "file1", "file2"]
    for at in range(3):
        assert_loaded(tmp_path / f"file{at}", {"a": torch.full((1 << 22,), at)})


def test_a_child_of_fork_does_not_wait_for_the_parent(tmp_path):
    program = """
import os, sys, threading, torch, mpgpu, mpgpu.torch
opened, write = threading.Event(), os.pwritev
def held(*arguments):
    opened.wait(60)
    return write(*arguments)
os.pwritev = held
pending = mpgpu.torch.save({"a": torch.ones(5)}, sys.argv[1], wait=False)
child = os.fork()
if child == 0:
    try:
        pending.wait()
    except mpgpu.Error as error:
        os._exit(7 if "child" in str(error) else 1)
    os._exit(2)
_, status = os.waitpid(child, 0)
opened.set()
pending.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "file")], timeout=120)
    assert result.returncode == 7
    assert_loaded(tmp_path / "file", {"a": torch.ones(5)})


# --- threads ----------------------------------------------------------------------------------------------------------------
def test_threads_save_to_the_same_path_and_load_complete_files(tmp_path):
    path, failures = tmp_path / "file", []
    mpgpu.torch.save({"a": torch.zeros(1 << 16)}, path)

    def run(at):
        try:
            for turn in range(10):
                value = float(at * 100 + turn)
                pending = mpgpu.torch.save({"a": torch.full((1 << 16,), value)}, path, wait=bool(turn % 2))
                if pending is not None:
                    pending.wait()
                loaded = mpgpu.torch.load(path, "cpu")["a"]
                assert bool((loaded == loaded[0]).all())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert os.listdir(tmp_path) == ["file"]
    assert not [each for each in threading.enumerate() if each.name.startswith(("mpgpu-write", "mpgpu-save"))]
