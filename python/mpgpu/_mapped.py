# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files as sources of copies."""

from __future__ import annotations

import contextlib
import os
from typing import Any, BinaryIO

from . import _library
from ._context import Context, _Freed, default_context
from ._library import check, ffi, lib, whole
from .errors import ArgumentError


class MappedFile(_library.Owner):
    """File whose bytes can be the source of copies. The library maps the whole file read-only, and several threads read the file
    when it is copied.

        with mpgpu.MappedFile("restart.bin") as file:
            mpgpu.copy(on_gpu, file[4096 : 4096 + on_gpu.nbytes])

    ``file[begin:end]`` is a read-only memoryview of these bytes. The file stays mapped until :meth:`close`, the end of the ``with`` block,
    or the release of this object and of all its memoryviews. Each of these first blocks until all work that is enqueued in the context has
    finished. If the file is truncated, copies that need the missing bytes fail. A program that itself reads missing bytes of a memoryview
    is terminated by SIGBUS.

    Args:
        file: path of a regular file, or a file object or descriptor that is open for reading. The descriptor is duplicated.
        cache: False to leave the page cache of the system unchanged. Bytes that it does not contain are then read by direct I/O.
        context: the context whose copies read the file. The default is :func:`default_context`.

    Raises:
        NotSupported: the file is empty, is not a regular file, is not open for reading, or is on a file system that cannot map files.
        ArgumentError: the descriptor is negative.
        DriverError: the descriptor is not open, or the system cannot map the file for another reason.
        OSError: the file cannot be opened.
    """

    __slots__ = ("__weakref__", "_bytes", "_context", "_data", "nbytes")

    def __init__(
        self, file: str | bytes | os.PathLike[str] | BinaryIO | int, *, cache: bool = True, context: Context | None = None
    ) -> None:
        self._context = context if context is not None else default_context()
        data, size = ffi.new("const void **"), ffi.new("uint64_t *")
        with contextlib.ExitStack() as opened:
            if isinstance(file, (str, bytes, os.PathLike)):
                # Without O_NONBLOCK, opening a FIFO would block until a program opens it for writing.
                file = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                opened.callback(os.close, file)
            elif hasattr(file, "fileno"):
                file = file.fileno()
            descriptor = whole(file)
            if descriptor is None:
                raise TypeError(f"file={file!r}: must be a path, or a file object or descriptor that is open for reading")
            check(lib.mp_file_map(self._context._handle, descriptor, int(not cache), data, size))
        self.nbytes: int = size[0]
        self._data: Any = ffi.gc(ffi.cast("void *", data[0]), _Freed(self._context, lib.mp_file_unmap))
        self._bytes: memoryview | None = memoryview(ffi.buffer(self._data, self.nbytes)).toreadonly()

    def __getitem__(self, part: slice) -> memoryview:
        if self._bytes is None:
            raise ArgumentError("the file is closed")
        if not isinstance(part, slice):
            raise TypeError(f"file[{part!r}]: must be a range of bytes, for example file[0:4096]")
        return self._bytes[part]

    def __len__(self) -> int:
        return self.nbytes

    def close(self) -> None:
        """Removes the mapping. Blocks until all work that is enqueued in the context has finished. Memoryviews of the file must not be
        used afterwards. A second call has no effect.
        """
        data, self._data, self._bytes = self._data, None, None
        if data is not None:
            ffi.gc(data, None)
            check(lib.mp_file_unmap(self._context._handle, data))

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mpgpu.MappedFile: {self.nbytes} bytes{'' if self._data is not None else ', closed'}>"
