# SPDX-License-Identifier: MIT OR Apache-2.0
"""List of executions that were still running when their request was dropped. The list keeps these executions, with all the memory that they
need, until they have finished.

It is checked for finished executions when further executions are enqueued or waited for, when plans are created and when memory is
allocated. The list belongs to the process. If it belonged to a context, it would keep that context alive.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import os
import time
from typing import Any

from ._library import NULL, ffi, lib

held: collections.deque[tuple[Any, object]] = collections.deque()
_test = lib.mp_test
_INT = ffi.typeof("int32_t *")

# Maximum time in seconds for which the exit of the process waits for these executions. An execution that waits for another process may
# never finish.
_SECONDS_AT_EXIT = 10.0


def hold(request: Any, plan: object) -> None:
    """Keeps ``plan`` alive until the execution has finished. Does not call the library, because the garbage collector may call this
    function at any time, even between a failed call and the reading of its error.
    """
    held.append((request, plan))


def collect(most: int) -> None:
    """Checks at most ``most`` executions and releases those that have finished. Stops at the first execution that is still running, and
    moves it to the end of the list.
    """
    if not held:
        return
    done = ffi.new(_INT)
    for _ in range(most):
        # The entry is removed only after the execution has finished, because a signal handler may raise an exception at any time.
        try:
            one = held[0]
        except IndexError:
            return
        done[0] = 0
        # A failed execution has also finished. The program has dropped the request, so its error is not reported.
        if _test(one[0], done, NULL) == 0 and not done[0]:
            held.rotate(-1)
            return
        try:
            held.remove(one)
        except ValueError:
            # Another thread has removed the entry.
            pass


def _at_exit() -> None:
    until = time.monotonic() + _SECONDS_AT_EXIT
    while held and time.monotonic() < until:
        collect(len(held))
        time.sleep(0.0001)
    # Executions that are still running, or are dropped from now on, are never released, because the process ends before they finish.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


atexit.register(_at_exit)
# A child of fork has no running executions.
os.register_at_fork(after_in_child=held.clear)
