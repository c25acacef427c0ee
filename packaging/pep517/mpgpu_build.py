# SPDX-License-Identifier: MIT OR Apache-2.0
"""Wraps Maturin with a check: if Rust or a C++ compiler is missing, `pip install` fails with a line that names the remedy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import maturin
from maturin import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _missing() -> str | None:
    manifest = Path(__file__).resolve().parents[2] / "Cargo.toml"
    wanted = re.search(r'^rust-version = "(\d+)\.(\d+)', manifest.read_text(), re.MULTILINE)
    assert wanted is not None
    rust = f"Rust {wanted[1]}.{wanted[2]} or later (https://rustup.rs)"
    if shutil.which("cargo") is None:
        return f"{rust}, and there is no cargo on PATH"
    found = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=False).stdout if shutil.which("rustc") else ""
    version = re.match(r"rustc (\d+)\.(\d+)", found)
    if version is None or (int(version[1]), int(version[2])) < (int(wanted[1]), int(wanted[2])):
        return f"{rust}, and PATH has {found.strip() or 'no rustc'}"
    if "CXX" not in os.environ and shutil.which("c++") is None:
        return "a C++17 compiler, and there is no c++ on PATH and no CXX"
    return None


def _check() -> None:
    missing = _missing()
    if missing is not None:
        sys.exit(f"mpgpu: building from source needs {missing}: install it and try again, or install a wheel, which needs neither.")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    _check()
    return list(maturin.get_requires_for_build_wheel(config_settings))


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    # The requirements are checked again here, because `--no-build-isolation` skips them.
    _check()
    return str(maturin.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    _check()
    return str(maturin.build_editable(wheel_directory, config_settings, metadata_directory))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    _check()
    return str(maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel
