# SPDX-License-Identifier: MIT OR Apache-2.0
"""Shared library of the wheel, and helpers for every call: statuses as exceptions, texts, options."""

from __future__ import annotations

import json
import operator
import os
from typing import Any, Callable, NoReturn, SupportsIndex

from ._native import ffi as _ffi  # made by maturin of include/mpgpu/mpgpu.h (python/build.rs)
from ._native import lib as _lib
from .errors import BY_STATUS, Error

ffi: Any = _ffi
lib: Any = _lib
NULL: Any = ffi.NULL

HOST: int = lib.MP_DEVICE_HOST
AUTO: int = lib.MP_DEVICE_AUTO
HEADER_VERSION: int = (lib.MP_VERSION_MAJOR * 100 + lib.MP_VERSION_MINOR) * 100 + lib.MP_VERSION_PATCH

SWITCH = {None: lib.MP_DEFAULT, True: lib.MP_ON, False: lib.MP_OFF}
ENGINE = {
    None: lib.MP_ENGINE_AUTO,
    "auto": lib.MP_ENGINE_AUTO,
    "stream": lib.MP_ENGINE_STREAM,
    "graph": lib.MP_ENGINE_GRAPH,
    "batch": lib.MP_ENGINE_BATCH,
    "kernel": lib.MP_ENGINE_KERNEL,
}
BACKEND = {
    None: lib.MP_BACKEND_AUTO,
    "auto": lib.MP_BACKEND_AUTO,
    "host": lib.MP_BACKEND_HOST,
    "cuda": lib.MP_BACKEND_CUDA,
}
SIGNAL_WAIT = {
    None: lib.MP_SIGNAL_WAIT_DEFAULT,
    "operation": lib.MP_SIGNAL_WAIT_OPERATION,
    "kernel": lib.MP_SIGNAL_WAIT_KERNEL,
}


class Owner:
    """Owner of an object of the library, which is released together with it. Cannot be copied, because two owners would release the object
    twice.
    """

    __slots__ = ()

    # `copy.copy`, `copy.deepcopy` and `pickle` all call this.
    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"mpgpu.{type(self).__name__} cannot be copied or pickled: it owns what goes with it; share the object, or make another one"
        )


def version() -> str:
    """Returns the version of the library, for example ``0.1.0``."""
    return string(lib.mp_version_string())


def string(text: Any) -> str:
    return str(ffi.string(text).decode("utf-8", "replace"))


def failure(status: int) -> Error:
    """Returns the exception for the status that a call of this thread has just returned."""
    info = sized("mp_error_info_t *")
    message, driver_code, argument = "", 0, None
    if lib.mp_last_error_info(info) == 0 and info.status == status:
        message = string(info.message) if info.message != NULL else ""
        driver_code = int(info.driver_code)
        argument = string(info.argument) if info.argument != NULL else None
    name = string(lib.mp_status_string(status))
    return BY_STATUS.get(name, Error)(message or name, status=name, driver_code=driver_code, argument=argument)


def check(status: int) -> None:
    if status:
        raise failure(status)


def sized(kind: str) -> Any:
    """Returns a struct that starts with its size and is otherwise zero, as the header's _INIT macros initialise it."""
    struct = ffi.new(kind)
    struct.size = ffi.sizeof(struct[0])
    return struct


def text_of(function: Callable[..., int], *arguments: Any) -> str:
    """Returns the text that a function writes, after a first call for its length."""
    length = ffi.new("size_t *")
    check(function(*arguments, NULL, 0, length))
    while True:
        capacity = length[0]
        text = ffi.new("char[]", capacity)
        status = function(*arguments, text, capacity, length)
        # The text has grown meanwhile.
        if status and length[0] > capacity:
            continue
        check(status)
        return string(text)


def json_of(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    return value


def path_text(path: str | os.PathLike[str]) -> Any:
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise BY_STATUS["MP_ERROR_INVALID_ARGUMENT"](f"path {path!r}: must not have a null character")
    return ffi.new("char[]", encoded)


def choice(name: str, values: dict[Any, int], value: Any) -> int:
    try:
        return values[value]
    except (KeyError, TypeError):
        known = ", ".join(repr(each) for each in values)
        raise BY_STATUS["MP_ERROR_INVALID_ARGUMENT"](f"{name}={value!r}: must be one of {known}", argument=name) from None


def option(name: str, value: int | None, most: int = 2**64 - 1) -> int:
    """Returns a number for an options struct. ``None`` selects the default, which is 0."""
    return 0 if value is None else number(name, value, most)


def number(name: str, value: Any, most: int = 2**64 - 1) -> int:
    found = whole(value)
    if found is None:
        raise TypeError(f"{name}={value!r}: must be a whole number")
    if not 0 <= found <= most:
        raise BY_STATUS["MP_ERROR_INVALID_ARGUMENT"](f"{name}={found}: must be from 0 to {most}", argument=name)
    return found


def whole(value: Any) -> int | None:
    """Returns an integer, also of NumPy; ``None`` for any other value, including booleans."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
