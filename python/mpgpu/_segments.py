# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies of many small tensors to or from one range of memory, by one kernel. A segment is a contiguous range of bytes to copy."""

from __future__ import annotations

import array
import sys
from typing import Any

from ._context import Context
from ._library import NULL, failure, ffi, lib
from ._pieces import _enqueue, _options, _Used
from ._plan import Request

_new = ffi.new
_cast = ffi.cast
_REQUEST = ffi.typeof("mp_request_t *")
_SEGMENTS = ffi.typeof("mp_segment_t *")
_BYTES = ffi.typeof("char *")
# Number of fields of a segment: destination address, source address and size in bytes.
_FIELDS = 3
assert ffi.sizeof("mp_segment_t") == _FIELDS * 8


class Segments:
    """List of segments, each with destination, source and size. Holds the objects that keep their memory allocated."""

    def __init__(self) -> None:
        self._numbers = array.array("Q")
        self._keep: list[Any] = []

    def add(self, dst: int, src: int, nbytes: int, keep: Any) -> None:
        self._numbers.extend((dst, src, nbytes))
        self._keep.append(keep)

    def __len__(self) -> int:
        return len(self._keep)

    def copy(self, gpu: int, context: Context, *, multiprocessors: int | None = None) -> Request:
        """Enqueues the copies in torch's current stream on a GPU. The returned request keeps the memory allocated."""
        used = _Used()
        used.keep = self._keep
        used.gpu = gpu
        if context._backend == "cuda":
            used.torch = sys.modules["torch"]
            used.add_tensor_on_gpu(gpu, "")
        pieces, count = _cast(_SEGMENTS, self._numbers.buffer_info()[0]), len(self._keep)
        options = NULL if multiprocessors is None else _options(multiprocessors, None)

        def begin(handle: Any) -> Request:
            request = _new(_REQUEST)
            made = Request((self._keep, context), request)
            status = lib.mp_copy_pieces(context._handle, pieces, count, options, handle, request)
            if status:
                made._held = None
                raise failure(status)
            return made

        return _enqueue(context, used, None, begin)

    def copy_by_cpu(self) -> None:
        """Copies the segments by the CPU, which must be able to access their memory. Blocks."""
        numbers = iter(self._numbers)
        for dst, src, nbytes in zip(numbers, numbers, numbers):
            ffi.memmove(_cast(_BYTES, dst), _cast(_BYTES, src), nbytes)
