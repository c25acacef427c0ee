# SPDX-License-Identifier: MIT OR Apache-2.0
"""Contents of files as memory: the mapping of a file, or copies of its bytes in host memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from ._context import Context
from ._mapped import MappedFile
from ._memory import Memory, memory_of
from .errors import ArgumentError, DriverError, NotSupported

# Maximum number of bytes of a mapped file that are copied in one batch. Between two batches, the links are idle for about a millisecond.
_BATCH = 16 << 30
# Maximum number of bytes that are read and copied in one batch if the file cannot be mapped.
_READ_BATCH = 256 << 20
# Number of bytes that one call asks the system to read ahead.
_AHEAD = 64 << 20
# Maximum number of buffers per system call (IOV_MAX of Linux).
MOST_BUFFERS = 1024


class _Contents:
    """Contents of a file as memory: the mapped file, or copies of its bytes if the system cannot map it.

    Args:
        file: the open file.
        path: path of the file, for messages.
        cache: False to leave the page cache of the system as it is.
        context: the context whose copies read the file. ``None`` if :meth:`range` is not called.
    """

    def __init__(self, file: BinaryIO, path: str, *, cache: bool, context: Context | None) -> None:
        self._file = file
        self._path = path
        self._pages: Memory | None = None
        # Reason why the file is not mapped.
        self.refusal = ""
        if context is None:
            return
        try:
            self._pages = memory_of(MappedFile(file, cache=cache, context=context)[:], path)
        except NotSupported as error:
            self.refusal = str(error)

    @property
    def batch(self) -> int:
        """Maximum number of bytes of the file that one batch copies to the devices."""
        return _BATCH if self._pages is not None else _READ_BATCH

    def range(self, begin: int, end: int) -> tuple[Memory, int]:
        """Returns memory that contains the bytes `begin` to `end - 1` of the file, and the file offset of the first byte of that memory."""
        if self._pages is not None:
            # The mapping has the size that the file had when it was mapped. The file may have been truncated before.
            if self._pages.nbytes < end:
                raise self._shorter()
            return self._pages, 0
        read = bytearray(end - begin)
        self.read([read], begin)
        return memory_of(read, self._path), begin

    def read(self, buffers: Sequence[Any], begin: int) -> None:
        """Reads the file from byte `begin` on into consecutive buffers, which must not be empty. Blocks."""
        position, filled, at = 0, 0, begin
        while position < len(buffers):
            some = list(buffers[position : position + MOST_BUFFERS])
            if filled:
                some[0] = memoryview(some[0])[filled:]
            count = os.preadv(self._file.fileno(), some, at)
            if count == 0:
                raise self._shorter()
            at += count
            filled += count
            while position < len(buffers) and filled >= len(buffers[position]):
                filled -= len(buffers[position])
                position += 1

    def close(self) -> None:
        """Drops this object's reference to the mapping, which is removed when no copy refers to it any more. The file stays open."""
        self._pages = None

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Returns a context manager for copies from memory of :meth:`range`. If a copy fails because the file was truncated, the exception
        states this reason.
        """
        try:
            yield
        except DriverError as error:
            if self._pages is not None and os.fstat(self._file.fileno()).st_size < self._pages.nbytes:
                raise self._shorter() from error
            raise

    def _shorter(self) -> ArgumentError:
        return ArgumentError(f"{self._path}: the file was truncated after its header was read: load it again when it is complete")


@contextlib.contextmanager
def reading_ahead(ranges: Sequence[tuple[int, int, int]]) -> Iterator[None]:
    """Returns a context manager. While it is active, a thread asks the system to read ranges of files ahead into the page cache. The system
    skips data that are already there.

    Args:
        ranges: file descriptor, first byte and end of each range. The files must be open until the context manager is exited.
    """
    ended = threading.Event()

    def ahead() -> None:
        for file, begin, end in ranges:
            for at in range(begin, end, _AHEAD):
                if ended.is_set():
                    return
                # This call is a hint. If it fails or the system ignores it, the copies read the data from the disk.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(file, at, min(_AHEAD, end - at), os.POSIX_FADV_WILLNEED)

    reader = threading.Thread(target=ahead, name="mpgpu-ahead", daemon=True)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()
