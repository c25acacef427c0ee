# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the command in wheels: `mpgpu run` finds the interposer that is installed with it."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

COMMAND = pathlib.Path(sys.prefix) / "bin/mpgpu"
# Folder with the substitute for the CUDA driver from the interposer's tests, and with a program that uses it.
DRIVEN = pathlib.Path(__file__).resolve().parents[2] / "build/ci/tests/preload"

pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="this wheel has no command: packaging/add_command adds it")


def run(*program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "run", "--", *program], capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_a_program_runs_with_the_interposer_of_the_wheel_and_ends_as_it_ends():
    ended = run(sys.executable, "-c", "print(open('/proc/self/maps').read()); raise SystemExit(7)")
    assert ended.returncode == 7, ended.stderr
    assert f"{sys.prefix}/bin/libmpgpu_preload.so" in ended.stdout


@pytest.mark.skipif("TESTED_WHEEL" not in os.environ, reason="tests/python/run sets TESTED_WHEEL to the path of the wheel")
def test_a_program_runs_with_the_interposer_of_a_wheel_that_was_installed_into_a_folder(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, os.environ["TESTED_WHEEL"]], check=True)
    ended = subprocess.run([tmp_path / "bin/mpgpu", "run", "cat", "/proc/self/maps"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"{tmp_path}/bin/libmpgpu_preload.so" in ended.stdout


def test_mpgpu_moves_bytes_in_a_program_under_it():
    program = "import mpgpu; a, b = bytearray(b'x' * 4096), bytearray(4096); mpgpu.copy(b, a); print(a == b)"
    assert run(sys.executable, "-c", program).stdout.splitlines() == ["True"]


@pytest.mark.skipif(not (DRIVEN / "mpgpu_preload_client").exists(), reason="the preset ci has not been built")
def test_copies_of_an_unchanged_program_are_taken():
    ended = run(
        str(DRIVEN / "mpgpu_preload_client"),
        "dlsym",
        "copies",
        LD_LIBRARY_PATH=str(DRIVEN / "driver"),
        MPGPU_TOPOLOGY="beluga",
        MPGPU_BACKEND="auto",
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^mpgpu: accelerated +[1-9]\d* copies, .* GPU to GPU$", ended.stderr, re.MULTILINE), ended.stderr


def test_the_command_plans_without_a_gpu():
    planned = subprocess.run([COMMAND, "plan", "--topology", "beluga", "gpu0:gpu1:64M"], capture_output=True, text=True, check=True)
    assert "plan for beluga: 1 transfer" in planned.stdout
