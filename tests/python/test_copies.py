# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that random batches between all kinds of memory copy every byte."""

from __future__ import annotations

import array
import ctypes
import mmap

import mpgpu
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICES = [mpgpu.HOST, 0, 1, 5]


def filled(count: int, seed: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, count, dtype=numpy.uint8)


end = st.sampled_from([*DEVICES, "numpy"])
size = st.one_of(st.integers(0, 300), st.integers(0, 1 << 16), st.integers(0, 3 << 20))


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.tuples(end, end, size, st.integers(0, 63), st.integers(0, 63)), max_size=8),
    seed=st.integers(0, 2**32 - 1),
    executions=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {},
        optional={
            "engine": st.sampled_from(["auto", "stream", "graph", "batch", "kernel"]),
            "max_paths": st.integers(1, 9),
            "host_path": st.booleans(),
            "adapt": st.booleans(),
            "chunk_bytes": st.sampled_from([4096, 65536]),
            "relay_chunks": st.integers(1, 5),
            "host_chunks": st.integers(1, 5),
            "min_bytes": st.sampled_from([0, 1 << 20]),
        },
    ),
)
def test_every_byte_of_a_random_batch_arrives_and_no_other_is_touched(batch, seed, executions, options):
    ends = []
    for dst_at, src_at, count, dst_offset, src_offset in batch:
        both = []
        for at, offset in ((dst_at, dst_offset), (src_at, src_offset)):
            whole = count + offset + 17
            memory = numpy.empty(whole, numpy.uint8) if at == "numpy" else mpgpu.empty(whole, device=at)
            both.append((memory, numpy.asarray(memory), offset, count))
        ends.append(both)

    def piece(memory, offset, count):
        return memory[offset : offset + count]

    plan = mpgpu.Plan([(piece(dst[0], dst[2], dst[3]), piece(src[0], src[2], src[3])) for dst, src in ends], **options)
    for execution in range(executions):
        expected = []
        for index, (dst, src) in enumerate(ends):
            dst[1][:] = filled(len(dst[1]), seed + 2 * index + execution)
            src[1][:] = filled(len(src[1]), seed + 2 * index + 1 + 7 * execution)
            after = dst[1].copy()
            after[dst[2] : dst[2] + dst[3]] = src[1][src[2] : src[2] + src[3]]
            expected.append(after)
        plan.execute().synchronize()
        for (dst, _), after in zip(ends, expected):
            assert numpy.array_equal(dst[1], after)


@pytest.mark.parametrize("dst_device", DEVICES)
@pytest.mark.parametrize("src_device", DEVICES)
def test_large_copies_between_devices_arrive(dst_device, src_device):
    src, dst = mpgpu.empty(9_000_001, device=src_device), mpgpu.empty(9_000_001, device=dst_device)
    src.numpy()[:] = filled(src.nbytes, 1)
    dst.numpy()[:] = 0
    request = mpgpu.copy(dst, src)
    assert request.done()
    assert numpy.array_equal(dst.numpy(), src.numpy())


class OnlyDlpack:
    """Object that supports only DLPack, with or without the version protocol."""

    def __init__(self, owner, versioned):
        self.owner, self.versioned = owner, versioned

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **arguments):
        assert stream is None
        if arguments and not self.versioned:
            raise TypeError("no max_version")
        return self.owner.__dlpack__(**arguments)


def kinds(count):
    """Yields writable memory of each kind, each with a function that reads the memory's bytes."""
    yield "bytearray", bytearray(count), bytes
    yield "memoryview", memoryview(bytearray(count)), bytes
    yield "array", array.array("h", bytes(count)), lambda x: x.tobytes()
    yield "ctypes", (ctypes.c_uint32 * (count // 4))(), bytes
    yield "mmap", mmap.mmap(-1, count), lambda x: x[:]
    yield "numpy", numpy.zeros((count // 8, 2), numpy.float32), lambda x: x.tobytes()
    yield "structured", numpy.zeros(count // 8, [("a", "i4"), ("b", "f4")]), lambda x: x.tobytes()
    yield "datetime", numpy.zeros(count // 8, "M8[s]"), lambda x: x.tobytes()
    yield "text", numpy.zeros(count // 8, "U2"), lambda x: x.tobytes()
    yield "dlpack", OnlyDlpack(numpy.zeros(count, numpy.uint8), False), lambda x: x.owner.tobytes()
    yield "dlpack 1.0", OnlyDlpack(numpy.zeros(count // 8, numpy.complex64), True), lambda x: x.owner.tobytes()
    yield "buffer", mpgpu.empty((count // 8, 2), "int32"), lambda x: bytes(x.memoryview())
    yield "buffer of a GPU", mpgpu.empty(count, device=1), lambda x: bytes(x.memoryview())


@pytest.mark.parametrize("kind", [name for name, _, _ in kinds(64)])
def test_memory_of_every_kind_is_read_and_written(kind):
    count = 4096
    src = next(memory for name, memory, _ in kinds(count) if name == kind)
    dst, read_dst = next((memory, read) for name, memory, read in kinds(count) if name == kind)
    bytes_in = filled(count, 3).tobytes()
    mpgpu.copy(src, bytes_in)
    mpgpu.copy(dst, src)
    assert read_dst(dst) == bytes_in


def test_a_transfer_of_no_bytes_does_nothing():
    plan = mpgpu.Plan([(bytearray(), b""), (numpy.empty((0, 3)), numpy.empty((5, 0))), (mpgpu.empty(0, device=1), mpgpu.empty(0))])
    plan.execute().synchronize()
    assert plan.info.bytes == 0


def test_a_plan_of_no_transfers_does_nothing():
    plan = mpgpu.Plan([])
    plan.prepare()
    plan.execute().synchronize()
    assert not any(plan.info)


def test_rows_of_a_buffer_are_views_of_it():
    buffer = mpgpu.empty((6, 4), "float32", device=0)
    buffer.numpy()[:] = numpy.arange(24).reshape(6, 4)
    rows = buffer[2:4]
    assert (rows.shape, rows.nbytes, rows.address, rows.device) == ((2, 4), 32, buffer.address + 32, 0)
    assert numpy.array_equal(rows, buffer.numpy()[2:4])
    mpgpu.copy(buffer[0:1], buffer[-1:])
    assert buffer.numpy()[0].tolist() == [20, 21, 22, 23]
    assert len(buffer[4:2]) == 0


def test_arrays_made_of_a_buffer_are_its_memory():
    buffer = mpgpu.empty(16, "int32", device=0)
    array_of_it = numpy.asarray(buffer)
    array_of_it[:] = 5
    assert array_of_it.ctypes.data == buffer.address
    assert numpy.from_dlpack(buffer).sum() == 80
    assert buffer.memoryview()[:4] == b"\5\0\0\0"
    assert buffer.__dlpack_device__() == (1, 0)


def test_the_element_type_of_a_buffer_has_its_usual_names():
    for given_type in ("float32", numpy.float32, numpy.dtype("float32")):
        assert mpgpu.empty(3, given_type).numpy().dtype == numpy.float32
    for name in ("bool", "uint8", "int8", "uint16", "int64", "float16", "float64", "complex64", "complex128"):
        assert mpgpu.empty(3, name).numpy().dtype == numpy.dtype(name)
    assert mpgpu.empty(3, float).numpy().dtype == numpy.float64


def test_shared_memory_serves_as_other_memory_does():
    shared = mpgpu.empty(5 << 20, shared=True)
    assert not shared.numpy().any()
    source = filled(5 << 20, 4)
    mpgpu.copy(shared, source)
    assert numpy.array_equal(shared.numpy(), source)


def test_a_plan_may_be_executed_in_any_stream(stream):
    src, dst = filled(1000, 5), numpy.zeros(1000, numpy.uint8)
    plan = mpgpu.Plan([(dst, src)])

    class Foreign:
        def __cuda_stream__(self):
            return (0, int(stream))

    class Property:
        __cuda_stream__ = (0, int(stream))

    class LikeTorch:
        cuda_stream = int(stream)

    class LikeCupy:
        ptr = int(stream)

    for given_stream in (None, stream, int(stream), Foreign(), Property(), LikeTorch(), LikeCupy(), 0):
        dst[:] = 0
        plan.prepare(given_stream)
        plan.execute(given_stream).synchronize()
        assert numpy.array_equal(dst, src)


def test_copies_of_a_stream_are_in_order(stream):
    first, second, third = (mpgpu.empty(1 << 20, device=device) for device in (0, 1, mpgpu.HOST))
    second.numpy()[:], third.numpy()[:] = 0, 0
    there, back = mpgpu.Plan([(second, first)]), mpgpu.Plan([(third, second)])
    for value in range(1, 20):
        first.numpy()[:] = value
        there.execute(stream)
        back.execute(stream).synchronize()
        assert (third.numpy() == value).all()


def test_descriptions_say_what_is_planned():
    a, b = mpgpu.empty(64 << 20, device=0), mpgpu.empty(64 << 20, device=1)
    plan = mpgpu.Plan([(b, a)])
    assert "gpu0 to gpu1" in plan.describe()
    assert plan.describe_json()["transfers"]
    info = plan.info
    assert info.bytes == 64 << 20
    assert 0 < info.predicted_seconds <= info.direct_seconds
    assert "67108864 bytes" in repr(plan)
    assert mpgpu.Plan([(b, a)], max_paths=1).info.paths == 1
    assert info.measured_seconds == info.measured_direct_seconds == 0


def test_bytes_of_others_pass_through_the_gpus_that_may():
    context = mpgpu.Context(topology="beluga")
    a, b = (context.empty(64 << 20, device=gpu) for gpu in (0, 1))
    paths = [mpgpu.Plan([(b, a)], host_path=False, relay_gpus=gpus).info.paths for gpus in ((), [2], (2, 3), None)]
    assert paths == [1, 2, 3, 3]
