# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files that replace existing files atomically, and threads that write them."""

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
# Maximum number of bytes of a write task.
_TASK_BYTES = 16 << 20


class NewFile:
    """Temporary file in the folder of the target. :meth:`commit` renames it to the target. Until then, the target is unchanged."""

    def __init__(self, path: Any) -> None:
        self.name = os.fsdecode(path)
        # If the path is a symbolic link, the file to which it leads is replaced.
        self._path = os.path.realpath(self.name)
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(self._path).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
            if not stat.S_ISREG(mode):
                raise ArgumentError(f"{self.name}: the path exists and is not a regular file: pass another path", argument="path")
        self._folder = os.path.dirname(self._path)
        # The temporary name does not contain the name of the target, which may already have the maximum length.
        self._temporary = os.path.join(self._folder, f".mpgpu-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        try:
            # The system applies the umask to these permissions.
            self.file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from None
        self._is_open = True

    def commit(self) -> None:
        """Blocks until the data are on the disk, and renames the file to the target."""
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
            # Some file systems do not support fsync on folders.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Removes the temporary file, unless it has been renamed to the target."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.file)


class Written:
    """Pending write of the threads of :class:`Writers`. Counts the tasks that have not finished."""

    def __init__(self, tasks: int, keep: Any) -> None:
        self._tasks = tasks
        self._keep = keep
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        if not tasks:
            self._ended.set()

    def finish(self, error: BaseException | None) -> None:
        """Counts one task as finished, and stores its error if it is the first."""
        with self._lock:
            self._error = self._error or error
            self._tasks -= 1
            if not self._tasks:
                self._keep = None
                self._ended.set()

    def wait(self) -> None:
        """Blocks until all tasks have finished. Raises the error of the first task that has failed."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Writers:
    """Threads that write disjoint ranges of a file."""

    def __init__(self, file: int, name: str) -> None:
        self._file = file
        self._name = name
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_failed = False
        # The interpreter waits for these threads when the program ends.
        self._threads = [threading.Thread(target=self._run, name="mpgpu-write", daemon=False) for _ in range(_WRITERS)]
        for thread in self._threads:
            thread.start()

    def write(self, buffers: Sequence[Any], begin: int, keep: Any = None) -> Written:
        """Enqueues tasks that write consecutive buffers to the file from byte ``begin`` on. Does not block. The returned object refers to
        ``keep`` until the data are written.
        """
        tasks = _tasks(buffers, begin)
        written = Written(len(tasks), keep)
        for some, at in tasks:
            self._tasks.put((some, at, written))
        return written

    def close(self) -> None:
        """Blocks until the threads have finished all enqueued tasks and have ended."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def cancel(self) -> None:
        """Cancels all tasks that have not started."""
        self._has_failed = True

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            buffers, at, written = task
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
            # The references are dropped now, so that the memory is freed before the next task arrives.
            del task, buffers, written

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


def _tasks(buffers: Sequence[Any], begin: int) -> list[tuple[list[Any], int]]:
    """Divides consecutive buffers into write tasks. Each task consists of parts of the buffers, and the file offset of the first part."""
    tasks: list[tuple[list[Any], int]] = []
    parts: list[Any] = []
    at, nbytes = begin, 0
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            part = view[: _TASK_BYTES - nbytes]
            parts.append(part)
            nbytes += len(part)
            view = view[len(part) :]
            if nbytes == _TASK_BYTES or len(parts) == MOST_BUFFERS:
                tasks.append((parts, at))
                parts, at, nbytes = [], at + nbytes, 0
    if parts:
        tasks.append((parts, at))
    return tasks
