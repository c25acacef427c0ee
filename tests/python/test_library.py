# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that the package and the C ABI agree, and that the package requires only cffi."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import pathlib
import re
import subprocess
import sys

import mpgpu
import pytest
from mpgpu._library import ffi, lib
from mpgpu.errors import BY_STATUS

SOURCES = pathlib.Path(__file__).resolve().parents[2]
HEADER = (SOURCES / "include/mpgpu/mpgpu.h").read_text(encoding="utf-8")


def test_every_function_of_the_header_is_declared_and_in_the_library():
    functions = re.findall(r"^(?:mp_status_t|uint32_t|const char \*)\s?(mp_\w+)\(", HEADER, re.MULTILINE)
    assert len(functions) > 50
    for name in functions:
        assert "function" in str(ffi.typeof(getattr(lib, name)).kind), name


def test_every_status_has_an_exception():
    statuses = re.findall(r"^ +(MP_ERROR_\w+) = \d+", HEADER, re.MULTILINE)
    assert sorted(BY_STATUS) == sorted(statuses)
    assert all(issubclass(kind, mpgpu.Error) for kind in BY_STATUS.values())


@pytest.mark.parametrize(
    ("values", "struct"),
    [
        (mpgpu.PlanInfo, "mp_plan_info_t"),
        (mpgpu.Statistics, "mp_statistics_t"),
        (mpgpu.DeviceStatistics, "mp_device_statistics_t"),
    ],
)
def test_what_is_told_has_every_field_of_the_header(values, struct):
    assert ("size", *values._fields) == tuple(name for name, _ in ffi.typeof(struct).fields)


@pytest.mark.parametrize(
    ("known", "enumeration"),
    [("ENGINE", "mp_engine_t"), ("BACKEND", "mp_backend_t"), ("SIGNAL_WAIT", "mp_signal_wait_t"), ("SWITCH", "mp_switch_t")],
)
def test_every_choice_of_the_header_can_be_made(known, enumeration):
    values = getattr(mpgpu._library, known).values()
    assert set(values) == set(ffi.typeof(enumeration).elements)


def test_the_version_is_the_header_s():
    version = ".".join(re.search(rf"#define MP_VERSION_{part} (\d+)", HEADER)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    assert mpgpu.__version__ == mpgpu.version() == importlib.metadata.version("mpgpu") == version
    assert f"\nversion: {version}\n" in (SOURCES / "CITATION.cff").read_text(encoding="utf-8")


def test_the_package_needs_cffi_alone():
    required = importlib.metadata.requires("mpgpu")
    assert [name for name in required if "extra ==" not in name] == ["cffi>=1.17"]
    program = """
import sys
import mpgpu
dst = bytearray(4)
mpgpu.copy(dst, b"1234")
print(dst.decode(), sorted({"numpy", "torch", "cupy", "pycparser", "mpi4py"} & set(sys.modules)))
"""
    # PATH contains no compiler and nothing else.
    result = subprocess.run(
        [sys.executable, "-I", "-c", program], env={"PATH": "/nonexistent", "MPGPU_BACKEND": "host"}, capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("1234 []\n", "")


def test_licences_are_in_the_package_with_their_whole_text():
    distribution = importlib.metadata.distribution("mpgpu")
    for name in ("LICENSE-MIT", "LICENSE-APACHE", "LICENSE-THIRD-PARTY"):
        assert distribution.read_text(f"licenses/{name}") == (SOURCES / name).read_text(encoding="utf-8"), name
    assert distribution.metadata["License-Expression"] == "MIT OR Apache-2.0"
    assert distribution.metadata["Author"] == "mpgpu contributors"


def test_types_are_part_of_the_package():
    assert importlib.resources.files("mpgpu").joinpath("py.typed").is_file()


def test_all_that_is_offered_is_there_and_documented():
    for name in mpgpu.__all__:
        assert getattr(mpgpu, name) is not None
        if name != "HOST":
            assert getattr(mpgpu, name).__doc__, name


def test_without_torch_its_module_says_what_is_missing():
    program = "import sys; sys.modules['torch'] = None\nimport mpgpu\nimport mpgpu.torch"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "import of torch halted" in result.stderr


def test_a_probe_gives_a_topology(tmp_path):
    context = mpgpu.Context("host", topology="beluga")
    text = context.probe(tmp_path / "probe.toml", quick=True)
    assert (tmp_path / "probe.toml").read_text() == text
    probed = mpgpu.Context("host", topology=tmp_path / "probe.toml")
    assert probed.gpus == context.gpus
