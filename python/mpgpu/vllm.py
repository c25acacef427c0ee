# SPDX-License-Identifier: MIT OR Apache-2.0
"""Model loader for vLLM, which loads the weights by :func:`mpgpu.torch.iter_load`.

    vllm serve MODEL --load-format mpgpu

vLLM imports this module in each of its processes, because the package names :func:`register` as a plugin. Programs do not import it. It is
tested with vLLM 0.33.0.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import vllm
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.platforms import current_platform

from ._context import Context
from ._load import iter_load
from ._shards import open_shards
from .errors import ArgumentError, NotSupported

_ENDING = ".safetensors"
_REMEDY = "pass --load-format auto"
_RELAYS = "MPGPU_RELAY_GPUS"
# Methods of DefaultModelLoader that vLLM does not document, and that Loader overrides or calls.
_REQUIRED = ("_get_weights_iterator", "_prepare_weights")


class Loader(DefaultModelLoader):  # type: ignore[misc]
    """Loader of safetensors files. It loads the files that vLLM finds or downloads with ``--load-format auto``.

    Each worker loads all tensors onto its device, in batches of at most 1 GiB, and the model keeps the worker's part of them. Tensors that
    the model does not use are not read, nor are experts of other workers if vLLM filters them (``--enable-ep-weight-filter``).

    Raises:
        ArgumentError: a file is not a safetensors file, or the configuration selects another method to read the files.
        NotSupported: this version of vLLM lacks a method that the loader needs.
    """

    def __init__(self, load_config: Any) -> None:
        missing = [name for name in _REQUIRED if not hasattr(DefaultModelLoader, name)]
        if missing:
            raise NotSupported(
                f"vLLM {vllm.__version__}: DefaultModelLoader has no {missing[0]}, which --load-format mpgpu needs: {_REMEDY}",
                status="MP_ERROR_NOT_SUPPORTED",
            )
        # vLLM selects the files by the format, and does not know files of the format "mpgpu".
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns an iterator of the names and tensors of a source."""
        self._check_options()
        prepared = self._prepare_weights(
            source.model_or_path, source.subfolder, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
        files: list[str] = prepared[1]
        for file in files:
            if not file.endswith(_ENDING):
                raise ArgumentError(f"{file}: --load-format mpgpu loads only *{_ENDING} files: {_REMEDY}", argument="load_format")
        # vLLM reports the time since this value.
        if self.counter_before_loading_weights == 0.0:  # type: ignore[has-type]
            self.counter_before_loading_weights = time.perf_counter()
        device = self.load_config.device or current_platform.device_type
        loaded = iter_load(files, device, select=_used(files, self._is_unused(source)), context=_context())
        return ((source.prefix + name, tensor) for name, tensor in loaded)

    def _check_options(self) -> None:
        """Raises an ArgumentError if an option selects another method to read the files."""
        strategy = self.load_config.safetensors_load_strategy
        if strategy is not None:
            # vLLM itself selects the strategy "torchao" for models that torchao has quantized.
            raise ArgumentError(
                f"safetensors_load_strategy={strategy!r}: --load-format mpgpu has no strategies: {_REMEDY}",
                argument="safetensors_load_strategy",
            )
        if self.load_config.model_loader_extra_config.get("enable_multithread_load"):
            raise ArgumentError(
                f"enable_multithread_load=True: --load-format mpgpu does not use this option: remove it, or {_REMEDY}",
                argument="enable_multithread_load",
            )

    def _is_unused(self, source: Any) -> Callable[[str], bool]:
        """Returns a function that is true for names of tensors that this worker does not use."""
        is_unused_by_model = getattr(source, "is_unused_weight", None)
        experts = getattr(self, "local_expert_ids", None)
        return lambda name: should_skip_weight(name, experts) or (is_unused_by_model is not None and is_unused_by_model(name))


def _used(files: Sequence[str], is_unused: Callable[[str], bool]) -> list[str] | None:
    """Returns the names of the tensors to load, or ``None`` for all."""
    with ExitStack() as opened:
        names = [name for shard in open_shards(files, opened) for name in shard.entries]
    used = [name for name in names if not is_unused(name)]
    return used if len(used) < len(names) else None


def _context() -> Context:
    """Creates the context of one load. Its staging memory is freed after the load.

    If there are several workers, the copies use no other GPUs as relays: the workers load at the same time, so relays would slow down the
    copies of other workers, and would need memory on their GPUs. A value of MPGPU_RELAY_GPUS that the user has set has precedence.
    """
    distributed = torch.distributed
    if _RELAYS in os.environ or not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return Context()
    os.environ[_RELAYS] = "none"
    try:
        return Context()
    finally:
        del os.environ[_RELAYS]


@functools.cache
def register() -> None:
    """Registers the loader as the load format ``mpgpu``. Later calls do nothing, because vLLM may load plugins several times."""
    register_model_loader("mpgpu")(Loader)
