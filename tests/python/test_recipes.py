# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that recipes of other package managers are valid for their tools and have this version."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2]
PACKAGING = SOURCES / "packaging"
if not PACKAGING.is_dir():
    pytest.skip("recipes lie in the repository", allow_module_level=True)
VERSION = re.search(r'^version = "(.*)"', (SOURCES / "Cargo.toml").read_text(), re.MULTILINE)[1]
RUST = re.search(r'^rust-version = "(.*)"', (SOURCES / "Cargo.toml").read_text(), re.MULTILINE)[1]


def test_rattler_build_renders_both_packages_of_the_conda_recipe():
    rattler_build = pytest.importorskip("rattler_build")
    recipe = rattler_build.Stage0Recipe.from_file(PACKAGING / "conda/recipe.yaml")
    # Settings from conda-forge's own file, as far as the recipe uses them.
    variants = rattler_build.VariantConfig.from_yaml(
        "c_compiler: [gcc]\ncxx_compiler: [gxx]\nrust_compiler: [rust]\nc_stdlib: [sysroot]\nc_stdlib_version: ['2.28']\n"
    )
    rendered = [variant.recipe for variant in recipe.render(variants)]
    assert {(str(each.package.name), str(each.package.version)) for each in rendered} == {("libmpgpu", VERSION), ("mpgpu", VERSION)}


def test_hadolint_finds_nothing_in_the_dockerfile():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    result = subprocess.run([hadolint, str(PACKAGING / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_recipe_of_spack_has_this_version_and_its_rust():
    # Spack is in no registry, so only the Python syntax of the recipe and its calls are checked.
    text = (PACKAGING / "spack/packages/mpgpu/package.py").read_text()
    calls = {
        (call.func.id, *(each.value for each in call.args if isinstance(each, ast.Constant)))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    assert {("version", VERSION), ("depends_on", f"rust@{RUST}:"), ("license", "MIT OR Apache-2.0")} <= calls


@pytest.fixture
def build_of_sources(monkeypatch, tmp_path):
    """Runs the build backend of pyproject.toml with only the programs `tools` on PATH.

    maturin is missing, because the backend must fail before it calls maturin.
    """
    monkeypatch.setitem(sys.modules, "maturin", types.SimpleNamespace(build_sdist=None, get_requires_for_build_sdist=None))
    monkeypatch.syspath_prepend(str(PACKAGING / "pep517"))
    monkeypatch.delitem(sys.modules, "mpgpu_build", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def build(**tools):
        for name, text in tools.items():
            tool = tmp_path / name.replace("cxx", "c++")
            tool.write_text(f"#!/bin/sh\necho '{text}'\n")
            tool.chmod(0o755)
        return importlib.import_module("mpgpu_build").get_requires_for_build_wheel()

    yield build
    sys.modules.pop("mpgpu_build", None)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ({}, rf"needs Rust {re.escape(RUST)} or later \(https://rustup\.rs\), and there is no cargo on PATH: install it"),
        ({"cargo": "", "rustc": "rustc 1.70.0 (90c541806 2023-05-31)"}, r"and PATH has rustc 1\.70\.0 .*: install it"),
        ({"cargo": "", "rustc": "rustc 1.999.0"}, r"needs a C\+\+17 compiler, and there is no c\+\+ on PATH and no CXX: install it"),
    ],
)
def test_a_build_of_the_sources_without_its_tools_ends_in_one_line_that_says_what_to_install(build_of_sources, tools, text):
    with pytest.raises(SystemExit, match=text) as ended:
        build_of_sources(**tools)
    assert "\n" not in str(ended.value)


def test_a_build_of_the_sources_with_its_tools_goes_on_to_maturin(build_of_sources):
    sys.modules["maturin"].get_requires_for_build_wheel = lambda _: ["asked"]
    assert build_of_sources(cargo="", rustc="rustc 1.999.0", cxx="") == ["asked"]
