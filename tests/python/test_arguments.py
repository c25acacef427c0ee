# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that wrong arguments are refused with a message that names the value and the remedy."""

from __future__ import annotations

import ctypes

import mpgpu
import numpy
import pytest

A = numpy.arange(64, dtype=numpy.uint8)


class OnGpu:
    """Object whose attributes claim that it is GPU memory."""

    def __init__(self, **more):
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "|u1", "data": (1 << 40, False), "version": 3, **more}


class Tpu:
    def __dlpack_device__(self):
        return (99, 0)

    def __dlpack__(self, **_):
        raise AssertionError("not asked for")


class NoCapsule:
    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        return "capsule"


class InBuffer:
    """Object whose data is a part of a larger buffer."""

    def __init__(self, offset, data=None):
        data = bytearray(range(8)) if data is None else data
        self.__array_interface__ = {"shape": (4,), "typestr": "|u1", "data": data, "offset": offset, "version": 3}


class Named(ctypes.Structure):
    _fields_ = [("Origin", ctypes.c_int), ("x", ctypes.c_int)]


def writable():
    return numpy.zeros(64, numpy.uint8)


NODE = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own])
CHANNEL = mpgpu.Channel(NODE, 0)

REFUSED = [
    (lambda: mpgpu.copy(3, A), TypeError, r"dst of transfer 0 is a int: it must have __dlpack__, "),
    (lambda: mpgpu.copy(writable(), [1, 2]), TypeError, r"src of transfer 0 is a list: it must have __dlpack__"),
    (lambda: mpgpu.Plan([(writable(), A), 7]), TypeError, r"transfer 1 is a int: it must be a pair \(dst, src\)"),
    (lambda: mpgpu.copy(writable()[:5], A), ValueError, r"transfer 0: dst has 5 bytes and src 64: they must have the same size"),
    (lambda: mpgpu.copy(writable()[::2], A[:32]), ValueError, r"dst of transfer 0: shape \(32,\) with strides \(2,\) is not contiguous"),
    (
        lambda: mpgpu.copy(writable(), A.reshape(8, 8).T),
        mpgpu.ArgumentError,
        r"strides \(1, 8\) is not contiguous in C order: copy numpy\.ascontiguousarray\(x\) instead",
    ),
    (
        lambda: mpgpu.copy(writable().reshape(8, 8).T, A.reshape(8, 8)),
        mpgpu.ArgumentError,
        r"^dst of transfer 0: .* is not contiguous in C order: write into a contiguous array and assign that to it afterwards "
        r"\(x\[\.\.\.\] = array\), or into each contiguous part$",
    ),
    (lambda: mpgpu.copy(memoryview(writable())[::2], A[:32]), mpgpu.ArgumentError, r"write into a contiguous array .* \(x\[:\] = array\)"),
    (lambda: mpgpu.copy(OnGpu(strides=(8,)), A[:4]), mpgpu.ArgumentError, r"write into a contiguous array"),
    (lambda: mpgpu.gather([A[:16], A[16:32]], writable()[::2]), mpgpu.ArgumentError, r"^the destination: .*write into a contiguous array"),
    (lambda: mpgpu.broadcast(A[:32], [writable()[::2]]), mpgpu.ArgumentError, r"^destination 0: .*write into a contiguous array"),
    (lambda: CHANNEL.receive(writable()[::2]), mpgpu.ArgumentError, r"^x: .*write into a contiguous array"),
    (lambda: NODE.plan([writable()[::2]], []), mpgpu.ArgumentError, r"^window 0: .*write into a contiguous array"),
    (lambda: NODE.gather(A, writable()[::2], 0), mpgpu.ArgumentError, r"^destination: .*write into a contiguous array"),
    (lambda: mpgpu.copy(bytearray(32), memoryview(A)[::2]), ValueError, r"shape \(32,\) with strides \(2,\) is not contiguous"),
    (lambda: mpgpu.copy(bytes(64), A), ValueError, r"dst of transfer 0 is read-only: copy into memory that may be written"),
    (lambda: mpgpu.copy(numpy.broadcast_to(A[:1], 64), A), ValueError, r"strides \(0,\) is not contiguous"),
    (lambda: mpgpu.copy(writable(), numpy.array([None] * 8)), ValueError, r"an array of Python objects holds addresses"),
    (lambda: mpgpu.copy(writable(), numpy.zeros(4, [("a", "O"), ("b", "i8")])), ValueError, r"an array of Python objects"),
    (lambda: mpgpu.copy(numpy.float64(1), A[:8]), ValueError, r"dst of transfer 0 is read-only"),
    (lambda: CHANNEL.receive(numpy.zeros(3)[1]), ValueError, r"x is read-only: receive into memory that may be written"),
    (lambda: mpgpu.copy(writable(), numpy.ma.array(A, mask=A > 3)), ValueError, r"a masked array is not copied with its mask"),
    (lambda: mpgpu.copy(bytearray(4), InBuffer(5)), ValueError, r"is not a buffer with 4 bytes from offset 5"),
    (lambda: mpgpu.copy(bytearray(4), InBuffer(0, "text")), ValueError, r"is not a buffer with 4 bytes from offset 0"),
    (lambda: mpgpu.copy(bytearray(8), (ctypes.py_object * 1)(None)), ValueError, r"a buffer of Python objects"),
    (
        lambda: mpgpu.copy(bytearray(4), OnGpu()),
        ValueError,
        r"src of transfer 0 is memory of a GPU, and the context runs on the host backend",
    ),
    (lambda: mpgpu.copy(bytearray(4), OnGpu(strides=(8,))), ValueError, r"shape \(4,\) with strides \(8,\) is not contiguous"),
    (lambda: mpgpu.copy(bytearray(4), OnGpu(mask=A)), ValueError, r"a masked array is not copied with its mask"),
    (lambda: mpgpu.copy(bytearray(4), Tpu()), ValueError, r"memory on DLPack's device type 99 cannot be accessed: move it to the CPU"),
    (lambda: mpgpu.copy(bytearray(4), NoCapsule()), ValueError, r"__dlpack__ of NoCapsule returned no DLPack capsule"),
    (lambda: mpgpu.copy(A, A), ValueError, r"transfer 0: its destination .* overlaps its own source"),
    (lambda: mpgpu.Plan([(A[:32], writable()[:32]), (A[16:48], writable()[:32])]), ValueError, r"overlap"),
    (lambda: mpgpu.Plan([], engine="steam"), ValueError, r"engine='steam': must be one of None, 'auto', 'stream', 'graph'"),
    (lambda: mpgpu.Plan([], max_paths=-1), ValueError, r"max_paths=-1: must be from 0 to 4294967295"),
    (lambda: mpgpu.Plan([], max_paths=2**40), ValueError, r"max_paths=1099511627776: must be from 0 to 4294967295"),
    (lambda: mpgpu.Plan([], min_bytes=2.5), TypeError, r"min_bytes=2\.5: must be a whole number"),
    (lambda: mpgpu.Plan([], relay_gpus=[0, 63]), ValueError, r"relay_gpus=63: must be from 0 to 62"),
    (lambda: mpgpu.Plan([], host_path="on"), ValueError, r"host_path='on': must be one of None, True, False"),
    (lambda: mpgpu.Plan([], adapt="on"), ValueError, r"adapt='on': must be one of None, True, False"),
    (lambda: mpgpu.Plan([], chunk_bytes=5), ValueError, r"chunk_bytes"),
    (lambda: mpgpu.Plan([], relay_chunks=2**32), ValueError, r"relay_chunks=4294967296: must be from 0 to 4294967295"),
    (lambda: mpgpu.Context("host", cache_graphs=-1), ValueError, r"cache_graphs=-1: must be from 0 to"),
    (lambda: mpgpu.Plan([]).execute("default"), TypeError, r"stream is a str: it must be a stream of torch, CuPy or mpgpu"),
    (lambda: mpgpu.Plan([]).execute(-1), TypeError, r"stream=-1: a handle is not negative"),
    (lambda: mpgpu.Plan([]).execute(True), TypeError, r"stream is a bool"),
    (lambda: mpgpu.Plan([]).execute(12345), ValueError, r"12345 is not a stream of this context"),
    (lambda: mpgpu.Stream(99), ValueError, r"device 99 does not exist: this context has GPUs 0 to 7"),
    (lambda: mpgpu.empty(4, device=99), ValueError, r"device 99 does not exist"),
    (lambda: mpgpu.empty(4, device=-9), ValueError, r"host NUMA domain 8 does not exist: this context has GPUs 0 to 7 and the host"),
    (lambda: mpgpu.empty(-4), ValueError, r"shape=-4: must not be negative"),
    (lambda: mpgpu.empty((2, -4)), ValueError, r"shape=\(2, -4\): must not be negative"),
    (lambda: mpgpu.empty(4, "float31"), ValueError, r"dtype='float31': must be a name such as 'uint8', 'float32', 'f4' or 'bfloat16'"),
    (lambda: mpgpu.empty(4, "int7"), ValueError, r"dtype='int7'"),
    (lambda: mpgpu.empty(1 << 60), MemoryError, r"."),
    (lambda: mpgpu.empty(1 << 62, "float64"), MemoryError, r"36893488147419103232 bytes are more than any memory has"),
    (lambda: mpgpu.empty((2.7,)), TypeError, r"shape=\(2\.7,\): must be a whole number, or one for each dimension"),
    (lambda: mpgpu.empty("4"), TypeError, r"shape='4': must be a whole number"),
    (lambda: mpgpu.empty(4, numpy.dtype("O")), ValueError, r"dtype=dtype\('O'\): Python objects cannot be copied"),
    (lambda: mpgpu.empty(4, numpy.dtype([("a", "O")])), ValueError, r"Python objects cannot be copied"),
    (lambda: mpgpu.empty(4, device="metal"), TypeError, r"device='metal': must be the number of a GPU, HOST, host\(1\), 'cuda:0', "),
    (lambda: mpgpu.empty(4, device="cuda:99"), ValueError, r"device 99 does not exist"),
    (lambda: mpgpu.empty(4, device=True), TypeError, r"device=True: must be the number of a GPU"),
    (lambda: mpgpu.empty(4, device=1 << 40), ValueError, r"device=1099511627776: does not exist"),
    (lambda: mpgpu.Stream("cuda:x"), TypeError, r"device='cuda:x': must be the number of a GPU"),
    (lambda: mpgpu.Plan([], relay_gpus=["cpu"]), ValueError, r"relay_gpus=-1: must be from 0 to 62"),
    (lambda: CHANNEL._messenger.send(A, 0, metadata="text"), TypeError, r"metadata is a str: it must be bytes"),
    (lambda: CHANNEL._messenger.send(A, 0.0), TypeError, r"rank=0\.0: must be a whole number"),
    (lambda: mpgpu.Channel(NODE, numpy.int64(1)), ValueError, r"rank=1: must be below 1, the number of ranks"),
    (lambda: mpgpu.empty(4)[1], TypeError, r"supports slices of its first dimension"),
    (lambda: mpgpu.empty(4)[::2], TypeError, r"with step 1"),
    (lambda: mpgpu.host(-1), ValueError, r"domain=-1: NUMA domains are numbered from 0 up"),
    (lambda: mpgpu.Context("metal"), ValueError, r"backend='metal': must be one of None, 'auto', 'host', 'cuda'"),
    (lambda: mpgpu.Context("host", topology="beluge"), mpgpu.ConfigurationError, r"beluge"),
    (lambda: mpgpu.Context("host", signal_wait="spin"), ValueError, r"signal_wait='spin': must be one of"),
    (lambda: mpgpu.Context("host", host_threads=257), ValueError, r"host_threads=257: must be from 0 to 256"),
    (lambda: mpgpu.Node(), TypeError, r"a Node needs comm, or rank and ranks with allgather or socket"),
    (lambda: mpgpu.Node(rank=0, ranks=1), TypeError, r"either an allgather or the path of a socket"),
    (lambda: mpgpu.Node(object(), rank=0), TypeError, r"comm provides rank, ranks and allgather"),
    (lambda: mpgpu.Node(rank=2, ranks=1, allgather=lambda x: x), ValueError, r"rank"),
    (
        lambda: mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own], devices=[mpgpu.HOST]),
        mpgpu.ArgumentError,
        r"^the host is not a GPU",
    ),
    (lambda: mpgpu.NodePlan(), TypeError, r"created by Node\.plan"),
    (lambda: CHANNEL._messenger.send(A, mpgpu.ANY), ValueError, r"rank=-2147483647: must be from 0 to 0"),
    (lambda: CHANNEL._messenger.receive(writable(), 5), ValueError, r"rank=5: must be from 0 to 0"),
    (lambda: CHANNEL._messenger.probe(-7), ValueError, r"rank=-7: must be from 0 to 0"),
    (lambda: CHANNEL._messenger.send(A, None), TypeError, r"rank=None: must be a whole number"),
    (lambda: CHANNEL._messenger.send(A, 0, 2**63), ValueError, r"tag=9223372036854775808: must be from 0 to"),
    (lambda: CHANNEL._messenger.receive(writable(), 0, None), TypeError, r"tag=None: must be a whole number"),
    (lambda: CHANNEL._messenger.receive(writable(), mask=-1), ValueError, r"mask=-1: must be from 0 to"),
    (lambda: mpgpu.Channel(NODE, None), TypeError, r"rank=None: must be a whole number"),
    (lambda: mpgpu.Entries(CHANNEL._messenger).on_message(-2), ValueError, r"tag=-2: must be from 0 to"),
    (lambda: mpgpu.Entries(CHANNEL._messenger).on_message(1, mask=2**63), ValueError, r"mask=9223372036854775808: must be"),
    (lambda: NODE.broadcast(A, -1), ValueError, r"root=-1: must be from 0 to 0"),
    (lambda: NODE.broadcast(A, 2**70), ValueError, r"root=1180591620717411303424: must be from 0 to 0"),
    (lambda: NODE.broadcast(A, 1.0), TypeError, r"root=1\.0: must be a whole number"),
    (lambda: NODE.broadcast(A, None), TypeError, r"root=None: must be a whole number"),
    (lambda: NODE.gather(A, writable(), 1), ValueError, r"root=1: must be from 0 to 0"),
    (lambda: NODE.scatter(A, writable(), 0, sizes=[-1]), ValueError, r"sizes=-1: must be from 0 to"),
    (lambda: NODE.scatter(A, writable(), 0, sizes=[]), ValueError, r"sizes=\[\]: 0 sizes for 1 ranks: pass one for each"),
    (lambda: NODE.all_gather(A, writable(), sizes=[64, 0]), ValueError, r"sizes=\[64, 0\]: 2 sizes for 1 ranks: pass one for each"),
    (lambda: NODE.all_gather(A, writable(), sizes=[2**64]), ValueError, r"sizes=18446744073709551616: must be from 0 to"),
    (lambda: NODE.all_gather(A, writable(), sizes=64), TypeError, r"sizes=64: must be a list of whole numbers, bytes of each part"),
    (lambda: NODE.all_to_all(A, writable(), sent=[64.0]), TypeError, r"sent=\[64\.0\]: must be a list of whole numbers"),
    (lambda: NODE.all_to_all(A, writable(), received=[-64]), ValueError, r"received=-64: must be from 0 to"),
    (lambda: mpgpu.all_to_all([A], [writable()], sizes=[[-64]]), ValueError, r"sizes=-64: must be from 0 to"),
    (lambda: NODE.plan([writable()], [((0, 2**32, 0), (0, 0, 0), 4)]), ValueError, r"transfer 0: window=4294967296: must be from 0 to"),
    (lambda: NODE.plan([writable()], [((0, 0), (0, 2**32 - 1, 8), 4)]), ValueError, r"transfer 0: window=4294967295: must be from 0 to"),
    (lambda: NODE.plan([writable()], [((2**32, 0), (0, 0), 4)]), ValueError, r"transfer 0: rank=4294967296: must be from 0 to"),
    (lambda: NODE.plan([writable()], [((0, 0, 2**64), (0, 0), 4)]), ValueError, r"transfer 0: offset=18446744073709551616: must be"),
    (lambda: NODE.plan([writable()], [((0, 0), (0, 0), 2**64)]), ValueError, r"transfer 0: bytes=18446744073709551616: must be"),
    (lambda: NODE.plan_exchange([mpgpu.send_to(1, A)]), ValueError, r"rank=1: must be from 0 to 0"),
    (lambda: NODE.plan_exchange([mpgpu.send_to(0, A, -1)]), ValueError, r"tag=-1: must be from 0 to"),
    (lambda: NODE.plan_exchange([mpgpu.send_to(0, A, None)]), TypeError, r"tag=None: must be a whole number"),
    (lambda: mpgpu.Messenger(NODE, operations=2**32), ValueError, r"operations=4294967296: must be from 0 to"),
    (lambda: mpgpu.Node(rank=-1, ranks=1, allgather=lambda own: [own]), ValueError, r"rank=-1: must be from 0 to"),
    (lambda: mpgpu.Node(rank=0, ranks=2**32, allgather=lambda own: [own]), ValueError, r"ranks=4294967296: must be from 0 to"),
    (lambda: mpgpu.Plan([]).execute(2**64), ValueError, r"stream=18446744073709551616: a handle is an address, of 64 bits at most"),
    (lambda: mpgpu.Plan([]).prepare(2**64), ValueError, r"stream=18446744073709551616: a handle is an address"),
    (lambda: CHANNEL.send(A, 2**64), ValueError, r"stream=18446744073709551616: a handle is an address"),
    (lambda: mpgpu.host(1.0), TypeError, r"domain=1\.0: must be a whole number"),
    (lambda: mpgpu.empty(4, device=mpgpu.host(2**40)), ValueError, r"device=-1099511627777: does not exist"),
    (lambda: mpgpu.default_context().uuid(2**31), ValueError, r"device=2147483648: does not exist"),
    (lambda: mpgpu.default_context().device_statistics(-(2**40)), ValueError, r"device=-1099511627776: does not exist"),
    (lambda: mpgpu.Context("host", topology="belu\0ga"), ValueError, r"path 'belu\\x00ga': must not have a null character"),
    (lambda: mpgpu.Context("host", staging_bytes=2**64), ValueError, r"staging_bytes=18446744073709551616: must be from 0 to"),
]


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_refused_with_its_value_and_the_remedy(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
    # The library is still usable after the error.
    dst = bytearray(64)
    mpgpu.copy(dst, A)
    assert dst == A.tobytes()


def test_whole_numbers_may_be_those_of_numpy():
    assert mpgpu.empty(numpy.prod((3, 4))).shape == (12,)
    assert mpgpu.empty((numpy.int8(3), 4), device=numpy.int64(0)).shape == (3, 4)
    node = mpgpu.Node(rank=numpy.int64(0), ranks=numpy.uint8(1), allgather=lambda own: [own])
    messenger, into = mpgpu.Messenger(node), bytearray(4)
    messenger.send(b"abcd", numpy.int32(0), numpy.uint64(3), metadata=bytearray(b"beside"))
    assert messenger.receive(into, numpy.int64(0), numpy.int64(3)).synchronize() == (0, 3, 4, b"beside")
    assert mpgpu.Channel(messenger, numpy.int64(0)).rank == 0
    window = mpgpu.empty(8, shared=True)
    window.numpy()[:] = range(8)
    plan, stream = node.plan([window], [((0, 0, numpy.int64(4)), (numpy.int8(0), 0), numpy.int64(4))]), mpgpu.Stream(0)
    plan.execute(numpy.uint64(int(stream))).synchronize()
    assert bytes(window.numpy()) == bytes([0, 1, 2, 3] * 2)


def test_a_part_of_a_buffer_and_fields_of_any_name_are_copied():
    dst = bytearray(4)
    mpgpu.copy(dst, InBuffer(4))
    assert dst == bytes([4, 5, 6, 7])
    named = Named()
    mpgpu.copy(named, numpy.array([7, 9], numpy.int32))
    assert (named.Origin, named.x) == (7, 9)


def test_errors_have_the_status_and_the_argument():
    with pytest.raises(mpgpu.ArgumentError) as caught:
        mpgpu.copy(A, A)
    assert caught.value.status == "MP_ERROR_OVERLAP"
    assert isinstance(caught.value, mpgpu.Error)
    with pytest.raises(mpgpu.ArgumentError) as caught:
        mpgpu.empty(4, device=99)
    assert (caught.value.status, caught.value.argument, caught.value.driver_code) == ("MP_ERROR_INVALID_DEVICE", "device", 0)


def test_a_variable_of_the_environment_that_is_wrong_is_named(monkeypatch):
    monkeypatch.setenv("MPGPU_MAX_PATHS", "0")
    with pytest.raises(mpgpu.ConfigurationError, match="MPGPU_MAX_PATHS=0: must be 1 or more") as caught:
        mpgpu.Context("host")
    assert caught.value.status == "MP_ERROR_ENVIRONMENT"


def test_memory_of_two_contexts_is_not_mixed():
    one, other = mpgpu.Context("host"), mpgpu.Context("host")
    with pytest.raises(mpgpu.ArgumentError, match="belongs to another context"):
        mpgpu.copy(one.empty(4), other.empty(4))
    with pytest.raises(mpgpu.ArgumentError, match="belongs to another context"):
        mpgpu.copy(one.empty(4), b"1234", context=other)


def test_a_stream_of_another_context_is_refused():
    other = mpgpu.Context("host")
    with pytest.raises(mpgpu.ArgumentError, match="is not a stream of this context"):
        mpgpu.Plan([]).execute(mpgpu.Stream(0, context=other))


def test_memory_of_a_gpu_is_offered_by_the_interface_that_fits():
    buffer = mpgpu.empty(4, device=0)
    with pytest.raises(AttributeError, match="use __array_interface__"):
        _ = buffer.__cuda_array_interface__
    assert not hasattr(buffer, "__cuda_array_interface__")
    assert buffer.__array_interface__["data"] == (buffer.address, False)
