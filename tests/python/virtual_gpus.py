# SPDX-License-Identifier: MIT OR Apache-2.0
"""Virtual GPUs of the host backend as devices of torch, so that loading and saving run as on GPUs without one."""

from __future__ import annotations

import math

import mpgpu
import mpgpu.torch
import torch


class VirtualGpus:
    """Memory of virtual GPUs in which torch's tensors are. torch considers them to be CPU tensors."""

    def __init__(self, monkeypatch):
        self._ranges = []
        self.allocations = []
        for module in (mpgpu._fill, mpgpu._load):
            monkeypatch.setattr(module, "allocated", self.empty)
        for module in (mpgpu._fill, mpgpu._save):
            monkeypatch.setattr(module, "gpu_of", self.gpu_of)
        monkeypatch.setattr(mpgpu._load, "torch_device", torch.device)

    def run_in_order(self, monkeypatch):
        """Waits for copies within GPUs. torch converts tensors in the stream of these copies, but tensors of virtual GPUs on the CPU."""
        enqueue = mpgpu._segments.Segments.copy

        def copy(*arguments, **options):
            request = enqueue(*arguments, **options)
            request.synchronize()
            return request

        monkeypatch.setattr(mpgpu._segments.Segments, "copy", copy)

    def empty(self, shape, dtype, device):
        """Allocates a tensor on a device: ``"cpu"`` or ``"cuda:N"``."""
        device = torch.device(device)
        self.allocations.append((tuple(shape), dtype, device))
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type == "cpu" or not nbytes:
            return torch.empty(shape, dtype=dtype)
        buffer = mpgpu.empty(nbytes, device=device.index)
        self._ranges.append((buffer.address, buffer.address + nbytes, device.index))
        return torch.frombuffer(buffer.memoryview(), dtype=torch.uint8).view(dtype).view(tuple(shape))

    def moved(self, tensor, device):
        moved = self.empty(tuple(tensor.shape), tensor.dtype, device)
        moved.copy_(tensor)
        return moved

    def gpu_of(self, tensor):
        address = tensor.data_ptr()
        # Later allocations may have the addresses of earlier ones that have been freed.
        return next((gpu for begin, end, gpu in reversed(self._ranges) if begin <= address < end), None)
