# SPDX-License-Identifier: MIT OR Apache-2.0
"""Progress messages of calls that copy many bytes."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any


class Progress:
    """Progress display on stderr: a bar if tqdm is installed, otherwise a line of text."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._begin = time.monotonic()
        self._bar: Any = None
        try:
            tqdm: Any = importlib.import_module("tqdm")
        except ImportError:
            return
        self._bar = tqdm.tqdm(total=total, desc=name, unit="B", unit_scale=True)

    def add(self, nbytes: int) -> None:
        """Adds ``nbytes`` to the number of copied bytes, and updates the display."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
            return
        rate = self._done / max(time.monotonic() - self._begin, 1e-9) * 1e-9
        text = f"\r{self._name}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate:.1f} GB/s"
        print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            print(file=sys.stderr)
