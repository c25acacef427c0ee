# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files of a model in the safetensors format: one file, a list of files, or the shards that an index names."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple, Union

from ._safetensors import Entry, open_file, read_header
from .errors import ArgumentError

Path = Union[str, "os.PathLike[str]"]

_INDEX = "model.safetensors.index.json"
_ENDING = ".safetensors"
_INDEX_ENDING = ".safetensors.index.json"
# Maximum size in bytes of an index. Indices of models are far smaller.
_LONGEST_INDEX = 1 << 30


class Shard(NamedTuple):
    """Open file with tensors, and the content of its header."""

    path: str
    file: BinaryIO
    entries: dict[str, Entry]
    # Size in bytes and modification time in nanoseconds, read before the header.
    state: tuple[int, int]

    def check_unchanged(self) -> None:
        """Raises an ArgumentError if the file was modified after its header was read."""
        size, changed = _state_of(self.file)
        if size < self.state[0]:
            raise ArgumentError(f"{self.path}: the file was truncated while it was read: load it again when it is complete")
        if (size, changed) != self.state:
            raise ArgumentError(f"{self.path}: the file was modified while it was read: load it again when it is complete")


class _Index(NamedTuple):
    """Index of a model: its path, and the name of the file that contains each tensor."""

    path: str
    files: dict[str, str]


def open_shards(path: Any, opened: ExitStack) -> list[Shard]:
    """Opens the files of a model and reads their headers. ``opened`` closes the files.

    Raises:
        ArgumentError: a file is invalid, truncated or missing; a file lacks a tensor that the index names; or two files have the same
            tensor.
        OSError: a file cannot be opened or read.
    """
    index: _Index | None = None
    if isinstance(path, (list, tuple)):
        if not path:
            raise ArgumentError("path=[]: pass at least one file", argument="path")
        paths = [os.fsdecode(each) for each in path]
    else:
        name = os.fsdecode(path)
        if os.path.isdir(name):
            index, paths = _in_folder(name)
        elif name.endswith(".json"):
            index = _read_index(name)
            paths = _paths_of(index)
        else:
            paths = [name]
    shards = [_open(each, index, opened) for each in paths]
    _check_distinct(shards)
    if index is not None:
        _check_complete(index, shards)
    return shards


def _open(path: str, index: _Index | None, opened: ExitStack) -> Shard:
    try:
        file = opened.enter_context(open_file(path))
    except (FileNotFoundError, IsADirectoryError) as error:
        if index is None:
            raise
        name = next(name for name, file in index.files.items() if _beside(index, file) == path)
        reason = "is missing" if isinstance(error, FileNotFoundError) else "is a folder"
        raise ArgumentError(
            f"{index.path}: the file {path} with tensor {name!r} {reason}: download or write it again", argument="path"
        ) from None
    state = _state_of(file)
    return Shard(path, file, read_header(file, path), state)


def _state_of(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _in_folder(folder: str) -> tuple[_Index | None, list[str]]:
    """Returns the index in a folder, or ``None`` if there is none, and the paths of the files with tensors."""
    names = sorted(os.listdir(folder))
    indices = [name for name in names if name.endswith(_INDEX_ENDING)]
    if _INDEX in indices:
        indices = [_INDEX]
    if len(indices) > 1:
        raise ArgumentError(f"{folder}: the folder has {len(indices)} indices: pass one of them: {', '.join(indices[:3])}", argument="path")
    if indices:
        index = _read_index(os.path.join(folder, indices[0]))
        return index, _paths_of(index)
    files = [os.path.join(folder, name) for name in names if name.endswith(_ENDING)]
    if not files:
        raise ArgumentError(f"{folder}: the folder has no *{_ENDING} files: pass a folder or a list of such files", argument="path")
    return None, files


def _read_index(path: str) -> _Index:
    with open_file(path) as file:
        content = file.read(_LONGEST_INDEX)
    try:
        found = json.loads(content.decode("utf-8"))["weight_map"]
        if not isinstance(found, dict) or not found:
            raise ValueError("its weight_map is not a JSON object with names of tensors")
    except (KeyError, TypeError):
        raise _refused(path, "it has no weight_map") from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, str(error)) from None
    for name, file in found.items():
        if not isinstance(file, str) or not file or "\0" in file:
            raise _refused(path, f"its weight_map assigns tensor {name!r} to {file!r:.200}, which is not a file name")
        # Symbolic links are followed, even to files outside the folder, because model caches consist of such links.
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise _refused(path, f"its weight_map assigns tensor {name!r} to {file!r:.200}, which is outside the folder of the index")
    return _Index(path, found)


def _refused(path: str, reason: str) -> ArgumentError:
    return ArgumentError(f"{path}: not an index of safetensors files: {reason}; download or write it again", argument="path")


def _beside(index: _Index, file: str) -> str:
    return os.path.join(os.path.dirname(index.path), os.path.normpath(file))


def _paths_of(index: _Index) -> list[str]:
    return [_beside(index, file) for file in sorted(set(map(os.path.normpath, index.files.values())))]


def _check_distinct(shards: list[Shard]) -> None:
    places: dict[str, str] = {}
    for shard in shards:
        for name in shard.entries:
            if name in places:
                raise ArgumentError(
                    f"{shard.path}: tensor {name!r} is also in {places[name]}: load the files in separate calls", argument="path"
                )
            places[name] = shard.path


def _check_complete(index: _Index, shards: list[Shard]) -> None:
    by_path = {shard.path: shard for shard in shards}
    for name, file in index.files.items():
        shard = by_path[_beside(index, file)]
        if name not in shard.entries:
            raise ArgumentError(
                f"{shard.path}: the file has no tensor {name!r}, which {index.path} assigns to it: download or write both again",
                argument="path",
            )
