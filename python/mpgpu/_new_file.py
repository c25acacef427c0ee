# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files that replace older files atomically, and threads that write them."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import stat
import threading
from collections.abc import Sequence
from typing import Any

from ._contents import MOST_BUFFERS
from .errors import ArgumentError

# Number of threads that write a file.
_WRITERS = 4
# Number of bytes that a thread writes at a time.
_STEP = 16 << 20


class NewFile:
    """New file beside an older one with the same path. :meth:`commit` replaces the older file; until then, it stays as it is."""

    def __init__(self, path: Any) -> None:
        self.name = os.fsdecode(path)
        # If the path is a link, the file to which it leads is replaced.
        self._path = os.path.realpath(self.name)
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(self._path).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
            if not stat.S_ISREG(mode):
                raise ArgumentError(f"{self.name}: neither a regular file nor a new one: pass another path", argument="path")
        self._folder = os.path.dirname(self._path)
        # The name is short, because the name of the older file may have the maximum length.
        self._temporary = os.path.join(self._folder, f".mpgpu-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        try:
            # The system removes the permissions of the umask.
            self.file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from None
        self._is_open = True

    def commit(self) -> None:
        """Waits until the data are on the disk, and replaces the older file."""
        try:
            os.fsync(self.file)
            self._close()
            os.replace(self._temporary, self._path)
            self._sync_folder()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from None

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            # Some file systems cannot write folders on request.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Removes the new file, unless it has replaced the older one."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.file)


class Written:
    """Data that the threads of :class:`Writers` write: a number of steps that have not finished."""

    def __init__(self, steps: int, keep: Any) -> None:
        self._steps = steps
        self._keep = keep
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        if not steps:
            self._ended.set()

    def finish(self, error: BaseException | None) -> None:
        """Counts one step as finished."""
        with self._lock:
            self._error = self._error or error
            self._steps -= 1
            if not self._steps:
                self._keep = None
                self._ended.set()

    def wait(self) -> None:
        """Blocks until the data are written. Raises the error of the first step that has failed."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Writers:
    """Threads that write disjoint ranges of a file."""

    def __init__(self, file: int, name: str) -> None:
        self._file = file
        self._name = name
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_failed = False
        # The interpreter waits for these threads when the program ends.
        self._threads = [threading.Thread(target=self._run, name="mpgpu-write", daemon=False) for _ in range(_WRITERS)]
        for thread in self._threads:
            thread.start()

    def write(self, buffers: Sequence[Any], begin: int, keep: Any = None) -> Written:
        """Writes buffers one after the other, from byte ``begin`` of the file on. Does not block. ``keep`` is kept alive until the data are
        written.
        """
        steps = _steps(buffers, begin)
        written = Written(len(steps), keep)
        for some, at in steps:
            self._steps.put((some, at, written))
        return written

    def close(self) -> None:
        """Waits for the threads, which finish all data that have been passed."""
        for _ in self._threads:
            self._steps.put(None)
        for thread in self._threads:
            thread.join()

    def cancel(self) -> None:
        """Skips data that have not been written."""
        self._has_failed = True

    def _run(self) -> None:
        while True:
            step = self._steps.get()
            if step is None:
                return
            buffers, at, written = step
            error: BaseException | None = None
            try:
                if not self._has_failed:
                    self._write(buffers, at)
            except OSError as failed:
                error = OSError(failed.errno, failed.strerror, self._name)
            except BaseException as failed:
                error = failed
            if error is not None:
                self._has_failed = True
            written.finish(error)
            # The data may be released now, and not only when the next step arrives.
            del step, buffers, written

    def _write(self, buffers: list[Any], at: int) -> None:
        while buffers:
            count = os.pwritev(self._file, buffers, at)
            if count == 0:
                raise OSError(errno.EIO, "the system writes no data")
            at += count
            first = 0
            while first < len(buffers) and count >= len(buffers[first]):
                count -= len(buffers[first])
                first += 1
            buffers = buffers[first:]
            if count:
                buffers[0] = memoryview(buffers[0])[count:]


def _steps(buffers: Sequence[Any], begin: int) -> list[tuple[list[Any], int]]:
    """Returns the steps that write buffers: the parts of the buffers, and the file offset of the first."""
    steps: list[tuple[list[Any], int]] = []
    parts: list[Any] = []
    at, nbytes = begin, 0
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            part = view[: _STEP - nbytes]
            parts.append(part)
            nbytes += len(part)
            view = view[len(part) :]
            if nbytes == _STEP or len(parts) == MOST_BUFFERS:
                steps.append((parts, at))
                parts, at, nbytes = [], at + nbytes, 0
    if parts:
        steps.append((parts, at))
    return steps
