# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes the pages of the Python API into the given folder with pdoc. Requires a Python with the package, but not torch."""

import pathlib
import sys
import unittest.mock

# mpgpu.torch imports it. Its types are not used.
sys.modules.setdefault("torch", unittest.mock.MagicMock(__spec__=None))

import pdoc  # noqa: E402
import pdoc.render  # noqa: E402

pdoc.render.configure(docformat="google", show_source=False)
pdoc.pdoc("mpgpu", "mpgpu.torch", output_directory=pathlib.Path(sys.argv[1]))
