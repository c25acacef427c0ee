# SPDX-License-Identifier: MIT OR Apache-2.0
"""Executions whose request was dropped while they ran: held, with all the memory that they need, until they have finished.

They are looked at when further ones begin or are waited for, plans made and memory allocated. Of the whole process and not of
a context, which would then hold itself.
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

# How long the end of the process waits for them. One that waits for another process may never finish.
_SECONDS_AT_EXIT = 10.0


def hold(request: Any, plan: object) -> None:
    """Keeps ``plan`` until the execution has finished.

    Calls nothing of the library: the garbage collector comes here at any time, also between a call that has failed and the reading of
    its error.
    """
    held.append((request, plan))


def collect(most: int) -> None:
    """Looks at up to ``most`` of them, up to the first that is still running, and lets go of those that have finished."""
    if not held:
        return
    done = ffi.new(_INT)
    for _ in range(most):
        # Taken out when it is over and not before: a signal handler may raise at any time.
        try:
            one = held[0]
        except IndexError:
            return
        done[0] = 0
        # One that has failed is over too: whoever drops a request does not want to hear of it.
        if _test(one[0], done, NULL) == 0 and not done[0]:
            held.rotate(-1)
            return
        try:
            held.remove(one)
        except ValueError:
            # Another thread has.
            pass


def _at_exit() -> None:
    until = time.monotonic() + _SECONDS_AT_EXIT
    while held and time.monotonic() < until:
        collect(len(held))
        time.sleep(0.0001)
    # What still runs, and what is dropped from now on, is never given back: the process ends under it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


atexit.register(_at_exit)
# A child of fork has none of them running.
os.register_at_fork(after_in_child=held.clear)
