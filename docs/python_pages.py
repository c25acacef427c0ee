# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes the pages of the Python API, by pdoc, into the folder that is named. For a Python that has the package; torch is not needed."""

import pathlib
import sys
import unittest.mock

# mpgpu.torch imports it. Its types are not looked at.
sys.modules.setdefault("torch", unittest.mock.MagicMock(__spec__=None))

import pdoc  # noqa: E402
import pdoc.render  # noqa: E402

pdoc.render.configure(docformat="google", show_source=False)
pdoc.pdoc("mpgpu", "mpgpu.torch", output_directory=pathlib.Path(sys.argv[1]))
