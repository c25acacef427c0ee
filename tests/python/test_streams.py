# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the current streams of frameworks with doubles of torch and CuPy whose tensors and streams belong to the host backend.

tests/gpu/python.py contains the same tests with the frameworks themselves.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types

import mpgpu
import numpy
import pytest
from conftest import Gate

COUNT = 1 << 20


class Storage:
    """Substitute for a storage of torch. It holds memory of a virtual GPU until it is resized."""

    def __init__(self, buffer):
        self.buffer = buffer

    def data_ptr(self):
        return self.buffer.address if self.buffer is not None else 0

    def nbytes(self):
        return self.buffer.nbytes if self.buffer is not None else 0


class Tensor:
    """Substitute for a GPU tensor of torch, with the attributes that mpgpu uses and with memory of a virtual GPU."""

    layout = "strided"
    is_cuda = True
    is_nested = is_quantized = is_meta = False
    nbytes = COUNT
    shape, strides = (COUNT,), (1,)

    def __init__(self, buffer):
        self.array, self.storage, self.device_number = buffer.numpy(), Storage(buffer), buffer.device

    def stride(self):
        return self.strides

    def storage_offset(self):
        return 0

    def is_contiguous(self):
        return True

    def is_conj(self):
        return False

    is_neg = is_conj

    def untyped_storage(self):
        return self.storage

    def get_device(self):
        return self.device_number

    def data_ptr(self):
        return self.storage.data_ptr()

    def numel(self):
        return COUNT

    def element_size(self):
        return 1


class Framework:
    """Substitute for the module torch."""

    def __init__(self, context):
        self.context = context
        self.streams = {gpu: mpgpu.Stream(gpu, context=context) for gpu in range(3)}
        # Current stream of each GPU: a stream, or the handle of a default stream.
        self.current: dict[int, object] = dict(self.streams)
        self.device_now = 0
        # GPUs that were made current, in this order.
        self.entered: list[int] = []
        cuda = types.SimpleNamespace(current_device=lambda: self.device_now, device=self.device, is_available=lambda: True)
        raw = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda gpu: int(self.current[gpu]))
        self.module = types.SimpleNamespace(Tensor=Tensor, UntypedStorage=Storage, strided="strided", cuda=cuda, _C=raw)

    @contextlib.contextmanager
    def device(self, gpu):
        self.entered.append(gpu)
        before, self.device_now = self.device_now, gpu
        yield
        self.device_now = before

    def tensor(self, gpu, value=0):
        tensor = Tensor(self.context.empty(COUNT, device=gpu))
        tensor.array[:] = value
        return tensor


@pytest.fixture
def framework(monkeypatch):
    context = mpgpu.Context("host")
    framework = Framework(context)
    monkeypatch.setitem(sys.modules, "torch", framework.module)
    # Streams of frameworks are considered only if the backend is "cuda".
    monkeypatch.setattr(context, "_backend", "cuda")
    monkeypatch.setattr(mpgpu.Buffer, "on_host", True)
    yield framework
    for stream in framework.streams.values():
        stream.synchronize()


def plan_of(framework, *pairs):
    return mpgpu.Plan(pairs, context=framework.context)


def test_a_plan_goes_to_the_stream_that_is_current_when_it_is_executed(framework):
    src, dst = framework.tensor(1, 5), framework.tensor(1)
    plan = plan_of(framework, (dst, src))
    gate = Gate(framework.streams[1])
    behind = plan.execute()
    framework.current[1] = other = mpgpu.Stream(1, context=framework.context)
    plan.execute().synchronize()
    assert (dst.array == 5).all()
    assert not behind.done()
    gate.open()
    behind.synchronize()
    other.synchronize()
    # No GPU was made current, because the handle determines the GPU of the stream.
    assert framework.entered == []


def test_a_plan_whose_storage_lost_its_memory_is_refused_in_every_stream(framework):
    src, dst, far = framework.tensor(1, 5), framework.tensor(1), framework.tensor(2)
    plans = [plan_of(framework, (dst, src)), plan_of(framework, (dst, src), (far, src))]
    for plan in plans:
        plan.execute().synchronize()
    # This line simulates resize_(0). The real allocator would reuse the memory, whereas here only the array loses it.
    dst.storage.buffer = None
    dst.array[:] = 0
    for plan in plans:
        for stream in (None, framework.streams[1], int(framework.streams[1])):
            with pytest.raises(
                mpgpu.ArgumentError, match=r"dst of transfer 0: the storage of the tensor had 1048576 bytes .* has 0 at 0x0"
            ):
                plan.execute(stream)
    with pytest.raises(mpgpu.ArgumentError, match="dst of transfer 0: the storage of the tensor has 0 bytes and the tensor 1048576"):
        plan_of(framework, (dst, src))
    assert not dst.array.any()


def test_a_plan_of_several_gpus_comes_after_the_current_streams_of_all(framework):
    for gated in (0, 1, 2):
        a, b, c = framework.tensor(0, 3), framework.tensor(1), framework.tensor(2)
        plan = plan_of(framework, (b, a), (c, framework.tensor(2, 4)))
        gate = Gate(framework.streams[gated])
        request = plan.execute()
        for stream in (framework.streams[gpu] for gpu in range(3) if gpu != gated):
            assert not _idle(stream), gated
        assert not b.array.any()
        assert not c.array.any()
        gate.open()
        request.synchronize()
        assert (b.array == 3).all()
        assert (c.array == 4).all()


def _idle(stream):
    """Returns true if the work that is enqueued in the stream completes. Work behind a closed gate does not complete."""
    marker = mpgpu.Plan([], context=stream._context).execute(stream)
    for _ in range(30):
        if marker.done():
            return True
        time.sleep(0.001)
    return False


def test_later_work_in_every_current_stream_sees_the_bytes(framework):
    a, b, seen = framework.tensor(0, 7), framework.tensor(1), framework.tensor(1)
    plan = plan_of(framework, (b, a))
    look = plan_of(framework, (seen, b))
    gate = Gate(framework.streams[0])
    plan.execute()
    request = look.execute(framework.streams[1])
    assert not request.done()
    gate.open()
    request.synchronize()
    assert (seen.array == 7).all()


def test_a_default_stream_is_that_of_the_tensor_s_gpu_and_what_was_current_is_so_again(framework):
    framework.current = {0: 0, 1: 0, 2: 2}
    src, dst = framework.tensor(1, 5), framework.tensor(1)
    plan = plan_of(framework, (dst, src))
    plan.execute().synchronize()
    assert (framework.entered, framework.device_now) == ([1], 0)
    framework.device_now = 1
    plan.execute().synchronize()
    plan.prepare()
    assert framework.entered == [1]
    stream = types.SimpleNamespace(cuda_stream=0, device_index=2)
    plan.execute(stream).synchronize()
    plan.prepare(stream)
    assert framework.entered == [1, 2, 2]


def test_a_copy_between_gpus_is_enqueued_and_one_with_the_host_is_waited_for(framework):
    src, dst = framework.tensor(1, 5), framework.tensor(1)
    gate = Gate(framework.streams[1])
    assert not mpgpu.copy(dst, src, context=framework.context).done()
    host = numpy.zeros(COUNT, numpy.uint8)
    opened = []
    timer = threading.Timer(0.1, lambda: (opened.append(True), gate.open()))
    timer.start()
    assert mpgpu.copy(host, dst, context=framework.context).done()
    assert opened
    timer.join()
    assert (host == 5).all()


def test_an_array_of_another_framework_is_waited_for_when_the_plan_is_made(framework):
    src, dst = framework.tensor(1, 5), framework.tensor(1)
    named = framework.streams[1]

    class Array:
        def __init__(self, tensor, stream):
            self.__cuda_array_interface__ = {
                "shape": (COUNT,),
                "typestr": "|u1",
                "data": (tensor.data_ptr(), False),
                "version": 3,
                "stream": stream,
            }

    gate = Gate(named)
    opened = []
    timer = threading.Timer(0.1, lambda: (opened.append(True), gate.open()))
    timer.start()
    plan = plan_of(framework, (Array(dst, None), Array(src, int(named))))
    assert opened
    timer.join()
    # The work runs in the stream that the array specifies.
    gate = Gate(named)
    request = plan.execute()
    assert not request.done()
    gate.open()
    request.synchronize()
    assert (dst.array == 5).all()


def test_arrays_of_cupy_go_to_its_current_stream(framework, monkeypatch):
    stream = framework.streams[2]
    device_now = [0]

    class Device:
        def __init__(self, number):
            self.id = number

        def __enter__(self):
            self.before, device_now[0] = device_now[0], self.id

        def __exit__(self, *_):
            device_now[0] = self.before

    class Array:
        flags = types.SimpleNamespace(c_contiguous=True)
        nbytes = COUNT

        def __init__(self, buffer):
            self.device = Device(buffer.device)
            self.data = types.SimpleNamespace(ptr=buffer.address, buffer=buffer)

    def current():
        # The stream is that of the current GPU, as with CuPy.
        assert device_now == [2]
        return types.SimpleNamespace(ptr=int(stream))

    cuda = types.SimpleNamespace(Device=Device, runtime=types.SimpleNamespace(getDevice=lambda: device_now[0]), get_current_stream=current)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Array, cuda=cuda))
    src, dst = framework.context.empty(COUNT, device=2), framework.context.empty(COUNT, device=2)
    src.numpy()[:] = 9
    plan = plan_of(framework, (Array(dst), Array(src)))
    gate = Gate(stream)
    request = plan.execute()
    assert not request.done()
    gate.open()
    request.synchronize()
    assert (dst.numpy() == 9).all()
    assert device_now == [0]
