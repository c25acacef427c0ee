# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages that tasks of an asyncio event loop await.

A message that arrives within microseconds should cost no more than polling for it. If it takes longer, the loop should run other tasks.
Waiting therefore has three phases. First, if no other task awaits a message, the task itself polls for a few microseconds. Then the event
loop polls between its other tasks for a few hundred microseconds. Then the library calls back from its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ._library import ffi
from .errors import Error

if TYPE_CHECKING:
    from ._message import Message

# Time in seconds for which a task itself polls for its message.
_IN_PLACE = 50e-6
# Time in seconds for which the event loop polls after any message has arrived.
_BY_THE_LOOP = 200e-6
# Maximum time in seconds by which tasks whose messages arrive immediately may delay other tasks of the loop.
_TURN = 1e-3
# Maximum number of messages to poll. Polling more of them takes longer than a callback.
_MOST_LOOKED_AT = 16
_SECONDS_AT_EXIT = 10.0

_now = time.perf_counter


class _Waiting:
    """Messages for which tasks of one event loop wait. Only the loop keeps this object alive, so it is released with the loop."""

    __slots__ = ("__weakref__", "futures", "looks", "loop", "turn", "until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.futures: dict[Message, list[asyncio.Future[None]]] = {}
        self.looks = False
        self.until = 0.0
        # Time at which the loop last ran other tasks.
        self.turn = 0.0

    def add(self, message: Message) -> asyncio.Future[None]:
        future = self.loop.create_future()
        self.futures.setdefault(message, []).append(future)
        if len(self.futures) > _MOST_LOOKED_AT:
            call_when_ended(self, message)
        elif not self.looks:
            self.looks = True
            self.until = _now() + _BY_THE_LOOP
            self.loop.call_soon(self.look)
        return future

    def remove(self, message: Message, future: asyncio.Future[None]) -> None:
        futures = self.futures.get(message, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                del self.futures[message]

    def look(self) -> None:
        for message in list(self.futures):
            if message._has_ended():
                self.ended(message)
                self.until = _now() + _BY_THE_LOOP
        if not self.futures or _now() >= self.until or len(self.futures) > _MOST_LOOKED_AT:
            self.looks = False
            for message in self.futures:
                call_when_ended(self, message)
        else:
            self.loop.call_soon(self.look)

    def ended(self, message: Message, error: Exception | None = None) -> None:
        for future in self.futures.pop(message, ()):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def _here() -> _Waiting:
    loop = asyncio.get_running_loop()
    of_loop: dict[str, Any] = loop.__dict__
    waiting: _Waiting | None = of_loop.get("_mpgpu_waiting")
    if waiting is None:
        waiting = of_loop["_mpgpu_waiting"] = _Waiting(loop)
    return waiting


def _told(waiting: _Waiting, message: Message) -> Generator[Any, None, None]:
    future = waiting.add(message)
    try:
        yield from future
    finally:
        # This also runs if the loop releases the task, and the task releases the message.
        waiting.remove(message, future)


def awaited(message: Message) -> Generator[Any, None, None]:
    """Returns when the message has ended. If the task is cancelled before that, cancels the message and waits until the message has ended.
    A message that has already matched is not cancelled; it ends when its data have arrived.
    """
    waiting = _here()
    try:
        now = _now()
        if now - waiting.turn > _TURN:
            waiting.turn = now
            yield
        if not waiting.futures:
            until = now + _IN_PLACE
            while not message._has_ended():
                if _now() >= until:
                    break
                # On the host backend, threads of these processes copy the data and need the CPU.
                os.sched_yield()
            else:
                return
        yield from _told(waiting, message)
    except asyncio.CancelledError:
        message.cancel()
        # If the message has matched, its data are still being written to memory that the caller could reuse.
        while not message._has_ended():
            with contextlib.suppress(asyncio.CancelledError):
                yield from _told(waiting, message)
        raise


# --- Callbacks of the library -----------------------------------------------------------------------------------------------
# Callbacks that the library has not made yet, by the number that it passes to the callback. The library makes each callback once, even if
# the message fails.
_owed: dict[int, tuple[weakref.ref[_Waiting], weakref.ref[Message]]] = {}
_numbers = itertools.count(1)


def call_when_ended(waiting: _Waiting, message: Message) -> None:
    """Requests a callback from the library that wakes the waiting tasks when a message has ended."""
    if message._called_in is waiting:
        return
    number = next(_numbers)
    _owed[number] = (weakref.ref(waiting), weakref.ref(message))
    is_called, error = False, None
    try:
        is_called = message._set_callback(_call, ffi.cast("void *", number))
    except Error as caught:
        error = caught
    if is_called:
        message._called_in = waiting
        return
    # The message has already ended, or there will be no callback.
    del _owed[number]
    waiting.loop.call_soon(waiting.ended, message, error)


@ffi.callback("mp_request_function_t")  # type: ignore[untyped-decorator]
def _call(user: Any, _: int) -> None:
    of_loop, of_message = _owed.pop(int(ffi.cast("uintptr_t", user)))
    waiting, message = of_loop(), of_message()
    if waiting is not None and message is not None:
        # A closed loop has no waiting tasks.
        with contextlib.suppress(RuntimeError):
            waiting.loop.call_soon_threadsafe(_look_at, waiting, message)


def _look_at(waiting: _Waiting, message: Message) -> None:
    message._called_in = None
    message._has_ended()
    waiting.ended(message)


def all_called(seconds: float = _SECONDS_AT_EXIT) -> None:
    """Blocks until the library has made all requested callbacks."""
    until = time.monotonic() + seconds
    while _owed and time.monotonic() < until:
        time.sleep(0.0001)


# A child of fork gets no callbacks.
os.register_at_fork(after_in_child=_owed.clear)
