# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that a failed mpgpu.torch.save leaves the older file intact: invalid arguments, errors of the system, and killed processes."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading

import mpgpu
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402
from virtual_gpus import VirtualGpus  # noqa: E402


@pytest.fixture
def older(tmp_path):
    """Path of a file in a folder of its own."""
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "file"
    mpgpu.torch.save({"older": torch.arange(3)}, path)
    return path


def assert_intact(path):
    assert mpgpu.torch.load(path, "cpu")["older"].tolist() == [0, 1, 2]
    assert os.listdir(path.parent) == [path.name]
    assert not [each for each in threading.enumerate() if each.name.startswith(("mpgpu-write", "mpgpu-save"))]


# --- arguments --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("tensors", "options", "text"),
    [
        ([torch.ones(1)], {}, r"tensors is a list: pass a dict of tensors, for example x\.state_dict\(\)"),
        (torch.nn.Linear(2, 2), {}, r"tensors is a Linear: pass a dict of tensors"),
        ({"a": 3}, {}, r"tensors\['a'\] is a int: it must be a tensor"),
        ({"a": {"b": torch.ones(1)}}, {}, r"tensors\['a'\] is a dict: it must be a tensor; pass a dict that contains only tensors"),
        ({3: torch.ones(1)}, {}, r"tensors has the key 3: names of tensors must be strings"),
        ({"__metadata__": torch.ones(1)}, {}, r"tensor '__metadata__': the format reserves this name for metadata: rename the tensor"),
        ({"\ud800": torch.ones(1)}, {}, r"the name or metadata .*\\ud800.* contains a surrogate, which UTF-8 cannot encode: change it"),
        (
            {"a": torch.ones(1, dtype=torch.complex128)},
            {},
            r"tensors\['a'\]: the format cannot store torch\.complex128: convert the tensor first",
        ),
        ({"a": torch.ones(3).to_sparse()}, {}, r"tensors\['a'\]: a tensor of layout torch\.sparse_coo has no single range of memory: pass"),
        ({"a": torch.ones(3, device="meta")}, {}, r"tensors\['a'\]: a tensor on meta has a shape and no memory"),
        ({"a": torch.ones(1)}, {"metadata": {"a": 1}}, r"metadata=\{'a': 1\}: must be a dict of strings"),
        ({"a": torch.ones(1)}, {"metadata": {1: "a"}}, r"metadata=\{1: 'a'\}: must be a dict of strings"),
        ({"a": torch.ones(1)}, {"metadata": "pt"}, r"metadata='pt': must be a dict of strings"),
    ],
)
def test_arguments_that_cannot_be_saved_are_refused(older, tensors, options, text, wait):
    with pytest.raises(mpgpu.ArgumentError, match=text):
        mpgpu.torch.save(tensors, older, wait=wait, **options)
    assert_intact(older)


def test_a_header_that_is_too_long_is_refused(older, monkeypatch):
    monkeypatch.setattr(mpgpu._safetensors, "_LONGEST_HEADER", 100)
    with pytest.raises(
        mpgpu.ArgumentError, match=r"the header has 112 bytes, but the format allows 100: save the tensors in several files"
    ):
        mpgpu.torch.save({"a": torch.ones(1), "b": torch.ones(1)}, older)
    monkeypatch.undo()
    assert_intact(older)


def test_paths_that_are_no_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("loop", tmp_path / "loop")
    before = sorted(os.listdir(tmp_path))
    tensors = {"a": torch.ones(1)}
    for path in ("/dev/null", tmp_path / "fifo"):
        with pytest.raises(mpgpu.ArgumentError, match=rf"{path}: the path exists and is not a regular file: pass another path"):
            mpgpu.torch.save(tensors, path)
    for path, kind in [(tmp_path, IsADirectoryError), (tmp_path / "nowhere" / "x", FileNotFoundError), (tmp_path / "loop", OSError)]:
        with pytest.raises(kind, match=str(path)):
            mpgpu.torch.save(tensors, path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_folder_that_cannot_be_written_is_refused(older, monkeypatch):
    # The superuser may write into every folder.
    open_usual = os.open

    def refused(path, flags, *more, **options):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_usual(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError, match=rf"Permission denied: '{older}'"):
        mpgpu.torch.save({"a": torch.ones(1)}, older)
    monkeypatch.undo()
    assert_intact(older)


# --- errors of the system ---------------------------------------------------------------------------------------------------
def failing(call, number, error):
    """Returns a function that fails at its call ``number``, counted from 0."""
    calls = iter(range(1 << 30))

    def failed(*arguments):
        if next(calls) == number:
            raise error
        return call(*arguments)

    return failed


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("name", "number", "error"),
    [
        ("pwritev", 0, OSError(errno.ENOSPC, "No space left on device")),
        ("pwritev", 3, OSError(errno.ENOSPC, "No space left on device")),
        ("pwritev", 9, OSError(errno.EIO, "Input/output error")),
        ("fsync", 0, OSError(errno.ENOSPC, "No space left on device")),
        ("fsync", 0, OSError(errno.EIO, "Input/output error")),
        ("replace", 0, OSError(errno.EACCES, "Permission denied")),
    ],
)
def test_errors_of_the_system_leave_the_older_file_intact(older, tmp_path, monkeypatch, name, number, error, wait, device):
    gpus = VirtualGpus(monkeypatch)
    tensors = {f"{at}": gpus.moved(torch.full((500,), at), device) for at in range(20)}
    monkeypatch.setattr(mpgpu._save, "_WINDOW", 1 << 13)
    monkeypatch.setattr(mpgpu._new_file, "_TASK_BYTES", 1 << 12)
    monkeypatch.setattr(os, name, failing(getattr(os, name), number, error))
    with pytest.raises(OSError, match=error.strerror) as caught:
        pending = mpgpu.torch.save(tensors, older, wait=wait)
        assert not wait
        try:
            pending.wait()
        except OSError:
            # Each call raises the error.
            with pytest.raises(OSError, match=error.strerror):
                pending.done()
            raise
    assert (caught.value.errno, caught.value.filename) == (error.errno, str(older))
    monkeypatch.undo()
    assert_intact(older)
    mpgpu.torch.save({"newer": torch.ones(1)}, older)
    assert mpgpu.torch.load(older, "cpu").keys() == {"newer"}


@pytest.mark.parametrize("wait", [True, False])
def test_a_limit_of_the_size_of_files_leaves_the_older_file_intact(older, wait):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal of this limit.
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{older}'"):
            pending = mpgpu.torch.save({"a": torch.zeros(1 << 20)}, older, wait=wait)
            pending.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_intact(older)


def test_writes_that_are_shorter_than_requested_are_continued(older, monkeypatch):
    usual = os.pwritev

    def short(file, buffers, at):
        first = memoryview(buffers[0])
        return usual(file, [first[: max(1, len(first) // 3)]], at)

    monkeypatch.setattr(os, "pwritev", short)
    tensors = {f"{at}": torch.arange(at) for at in range(50)}
    mpgpu.torch.save(tensors, older)
    monkeypatch.undo()
    loaded = mpgpu.torch.load(older, "cpu")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, mpgpu.Error])
@pytest.mark.parametrize("wait", [True, False])
def test_exceptions_while_data_are_copied_leave_the_older_file_intact(older, monkeypatch, error, wait):
    gpus = VirtualGpus(monkeypatch)
    tensors = {f"{at}": gpus.moved(torch.full((500,), at), "cuda:0") for at in range(20)}
    monkeypatch.setattr(mpgpu._save, "_WINDOW", 1 << 13)
    monkeypatch.setattr(mpgpu._save, "_copy", failing(mpgpu._save._copy, 3, error("in the middle")))
    with pytest.raises(error, match="in the middle"):
        mpgpu.torch.save(tensors, older, wait=wait)
    monkeypatch.undo()
    assert_intact(older)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_error_of_a_dropped_save_is_a_warning(older, monkeypatch, when):
    opened = threading.Event()

    def full(*_):
        opened.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.warns(
        RuntimeWarning,
        match=rf"{older}: the tensors were not saved \(.*No space left on device.*\); an older file with this path is unchanged",
    ):
        pending = mpgpu.torch.save({"a": torch.ones(5)}, older, wait=False)
        thread = next(each for each in threading.enumerate() if each.name == "mpgpu-save")
        if when == "before":
            del pending
            gc.collect()
            opened.set()
            thread.join()
        else:
            opened.set()
            thread.join()
            del pending
            gc.collect()
    monkeypatch.undo()
    assert_intact(older)


# --- killed processes -------------------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys, torch
import mpgpu.torch, mpgpu._new_file, mpgpu._save
moment, path, wait = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
mpgpu._new_file._TASK_BYTES = 1 << 16

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def killed_at(owner, name, number=0, after=False):
    call, calls = getattr(owner, name), iter(range(1 << 30))
    def killed(*arguments, **options):
        is_last = next(calls) == number
        if is_last and not after:
            kill()
        result = call(*arguments, **options)
        if is_last:
            kill()
        return result
    setattr(owner, name, killed)

def half(file, buffers, at, usual=os.pwritev):
    usual(file, [memoryview(buffers[0])[: len(buffers[0]) // 2]], at)
    kill()

if moment == "created": killed_at(mpgpu._new_file.Writers, "__init__")
if moment == "first write": os.pwritev = half
if moment == "some writes": killed_at(os, "pwritev", 5)
if moment == "all written": killed_at(os, "fsync")
if moment == "on disk": killed_at(os, "replace")
if moment == "renamed": killed_at(os, "replace", after=True)
if moment == "folder": killed_at(os, "fsync", 1)
pending = mpgpu.torch.save({"newer": torch.ones(1 << 20)}, path, wait=wait)
if pending is not None:
    pending.wait()
"""


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("moment", ["created", "first write", "some writes", "all written", "on disk", "renamed", "folder"])
def test_a_killed_process_leaves_the_older_or_the_complete_newer_file(older, moment, wait):
    result = subprocess.run([sys.executable, "-c", KILLED, moment, str(older), str(wait)], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGKILL, "", "")
    loaded = mpgpu.torch.load(older, "cpu")
    if moment in ("renamed", "folder"):
        assert loaded.keys() == {"newer"} and bool((loaded["newer"] == 1).all())
        assert os.listdir(older.parent) == [older.name]
    else:
        assert loaded["older"].tolist() == [0, 1, 2]
        temporary = [name for name in os.listdir(older.parent) if name != older.name]
        assert len(temporary) == 1 and temporary[0].startswith(".mpgpu-") and temporary[0].endswith(".tmp")
