# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests copies of blocks by index lists: every byte, refused arguments, streams and lifetimes."""

from __future__ import annotations

import array
import gc
import weakref

import mpgpu
import numpy
import pytest
from conftest import Gate
from hypothesis import given, settings
from hypothesis import strategies as st
from mpgpu import _dropped

GPU_OF = {"offload": (mpgpu.HOST, 0), "restore": (0, mpgpu.HOST), "between GPUs": (1, 0), "on the host": (mpgpu.HOST, mpgpu.HOST)}


def filled(count, seed):
    return numpy.random.default_rng(seed).integers(0, 256, count, dtype=numpy.uint8)


def rows(count, device=mpgpu.HOST, *, shape=(4, 2), gap=0, seed=0, dtype="float32"):
    """Returns an array whose rows have the elements of a block of ``shape``, then ``gap`` elements. Its contents are random."""
    found = mpgpu.empty((count, int(numpy.prod(shape)) + gap), dtype, device).numpy()
    found.view(numpy.uint8)[:] = filled(found.nbytes, seed).reshape(count, -1)
    return found


def blocks(count, device=mpgpu.HOST, *, shape=(4, 2), gap=0, **options):
    """Returns an array of blocks with random contents, with ``gap`` elements between two blocks."""
    found = rows(count, device, shape=shape, gap=gap, **options)
    return found[:, : found.shape[1] - gap].reshape(count, *shape)


def finished():
    """Drops finished copies, as any later call of the library does, and the memory that they kept alive."""
    while _dropped.held:
        _dropped.collect(len(_dropped.held))
    gc.collect()


@pytest.fixture
def close(stream):
    """Function that blocks the stream from now on, and returns the gate. It is called after all allocations: freeing memory waits for all
    work, so memory that other tests have dropped is freed first.
    """
    made = []

    def close():
        finished()
        made.append(Gate(stream))
        return made[0]

    yield close
    for gate in made:
        gate.open()


def in_bytes(x):
    return numpy.ascontiguousarray(x).reshape(len(x), -1).view(numpy.uint8)


KINDS_OF_INDEX = {
    "list": list,
    "tuple": tuple,
    "array": lambda values: array.array("l", values),
    **{name: lambda values, name=name: numpy.array(values, name) for name in ("int32", "int64", "uint32", "uint64")},
    "every other element": lambda values: numpy.repeat(numpy.array(values, "int64"), 2)[::2],
    "buffer": lambda values: index_on(mpgpu.HOST, values, "int64"),
}


def index_on(device, values, dtype):
    made = mpgpu.empty(len(values), dtype, device)
    made.numpy()[:] = values
    return made


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    direction=st.sampled_from(sorted(GPU_OF)),
    layers=st.integers(1, 4),
    counts=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    shape=st.sampled_from([(1,), (4, 2), (3, 1, 5), (1000,)]),
    kinds=st.tuples(st.sampled_from(sorted(KINDS_OF_INDEX)), st.sampled_from(sorted(KINDS_OF_INDEX))),
)
def test_random_blocks_arrive_and_no_other_byte_is_touched(data, direction, layers, counts, gaps, shape, kinds):
    to_device, of_device = GPU_OF[direction]
    whole = [rows(counts[0], to_device, shape=shape, gap=gaps[0], seed=2 * layer) for layer in range(layers)]
    dst = [each[:, : each.shape[1] - gaps[0]].reshape(-1, *shape) for each in whole]
    src = [blocks(counts[1], of_device, shape=shape, gap=gaps[1], seed=2 * layer + 1) for layer in range(layers)]
    to = data.draw(st.lists(st.integers(0, counts[0] - 1), unique=True))
    at = data.draw(st.lists(st.integers(0, counts[1] - 1), min_size=len(to), max_size=len(to)))
    expected = [each.view(numpy.uint8).copy() for each in whole]
    for wanted, of in zip(expected, src):
        wanted[to, : in_bytes(of).shape[1]] = in_bytes(of)[at]
    arrays = (dst, src) if layers > 1 or data.draw(st.booleans()) else (dst[0], src[0])
    mpgpu.copy_blocks(*arrays, KINDS_OF_INDEX[kinds[0]](to), KINDS_OF_INDEX[kinds[1]](at)).synchronize()
    for each, wanted in zip(whole, expected):
        assert numpy.array_equal(each.view(numpy.uint8), wanted)


@pytest.mark.parametrize("direction", sorted(GPU_OF))
def test_without_index_lists_the_blocks_are_copied_in_order(direction):
    to, of = GPU_OF[direction]
    dst, src = blocks(7, to, seed=1), blocks(7, of, seed=2)
    mpgpu.copy_blocks(dst, src).synchronize()
    assert numpy.array_equal(in_bytes(dst), in_bytes(src))


def test_one_index_list_gathers_or_scatters():
    dst, src = blocks(7, 0, seed=1), blocks(9, seed=2)
    before = in_bytes(dst).copy()
    mpgpu.copy_blocks(dst, src, src_index=[8, 0, 8]).synchronize()
    assert numpy.array_equal(in_bytes(dst)[:3], in_bytes(src)[[8, 0, 8]]) and numpy.array_equal(in_bytes(dst)[3:], before[3:])
    mpgpu.copy_blocks(dst, src, range(6, -1, -1)).synchronize()
    assert numpy.array_equal(in_bytes(dst)[::-1], in_bytes(src)[:7])


def test_a_single_block_is_copied():
    dst, src = blocks(1, 0, shape=(1,), seed=1), blocks(1, shape=(1,), seed=2)
    mpgpu.copy_blocks(dst, src, [0], [0]).synchronize()
    assert numpy.array_equal(in_bytes(dst), in_bytes(src))


@pytest.mark.parametrize("lists", [([], []), ((), None), (None, numpy.zeros(0, "int32")), (mpgpu.empty(0, "int64", 0), [])])
def test_empty_index_lists_copy_nothing(lists):
    dst, src = blocks(3, 0, seed=1), blocks(3, seed=2)
    before = in_bytes(dst).copy()
    request = mpgpu.copy_blocks(dst, src, *lists)
    request.synchronize()
    assert request.done() and numpy.array_equal(in_bytes(dst), before)


def test_empty_arrays_are_copied():
    mpgpu.copy_blocks([], []).synchronize()
    mpgpu.copy_blocks([], [], [0], [0]).synchronize()
    mpgpu.copy_blocks(mpgpu.empty((0, 8), "float32", 0), mpgpu.empty((0, 32)), [], []).synchronize()
    mpgpu.copy_blocks(mpgpu.empty((5, 0), device=0), mpgpu.empty((5, 0))).synchronize()


def test_blocks_of_different_types_and_shapes_match_by_their_bytes():
    dst, src = mpgpu.empty((4, 16), "uint8", 0), blocks(4, shape=(2, 2), seed=1)
    mpgpu.copy_blocks(dst, src).synchronize()
    assert numpy.array_equal(dst.numpy(), in_bytes(src))
    table = mpgpu.empty(4, "float64", 0)
    mpgpu.copy_blocks(table, src.view("float64")[:, 0, 0], [3, 1], [0, 2]).synchronize()
    assert table.numpy().view("uint64")[[3, 1]].tolist() == src.view("uint64")[[0, 2], 0, 0].tolist()


class OnlyInterface:
    """Object that supports only NumPy's array interface."""

    def __init__(self, owner):
        self.owner = owner
        self.__array_interface__ = owner.__array_interface__


class OnlyDlpack:
    """Object that supports only DLPack, without a shape."""

    def __init__(self, owner):
        self.owner = owner

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **arguments):
        return self.owner.__dlpack__(**arguments)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("wrap", [OnlyInterface, OnlyDlpack, memoryview])
def test_arrays_of_every_protocol_are_read_and_written(wrap, gap):
    dst, src = blocks(6, gap=gap, seed=1), blocks(6, 0, seed=2)
    if gap and wrap is not OnlyInterface:
        with pytest.raises(mpgpu.ArgumentError, match=r"^dst: .* is not contiguous"):
            mpgpu.copy_blocks(wrap(dst), wrap(src), [5, 0], [1, 2])
        return
    mpgpu.copy_blocks(wrap(dst), wrap(src), [5, 0], [1, 2]).synchronize()
    assert numpy.array_equal(in_bytes(dst)[[5, 0]], in_bytes(src)[[1, 2]])


def test_registered_memory_is_accepted_and_pageable_memory_refused():
    dst, src = blocks(8, 0, seed=1), numpy.arange(8 * 512, dtype="int64").reshape(8, 512)
    dst = blocks(8, 0, shape=(512,), dtype="int64")
    with pytest.raises(mpgpu.ArgumentError, match=r"src\[0\] .* is pageable or unknown memory: .*register it as pinned memory") as refused:
        mpgpu.copy_blocks(dst, src)
    assert refused.value.status == "MP_ERROR_INVALID_POINTER"
    with mpgpu.Registered(src):
        mpgpu.copy_blocks(dst, src, [0], [7]).synchronize()
    assert numpy.array_equal(dst[0], src[7])


# --- indices in memory of a GPU ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_index_lists_in_memory_of_a_gpu_are_read_when_the_copy_runs(dtype, stream, close):
    dst, src = blocks(8, 0, seed=1), blocks(8, seed=2)
    to, at = index_on(0, [0, 0, 0], dtype), index_on(0, [0, 0, 0], dtype)
    gate = close()
    request = mpgpu.copy_blocks(dst, src, to, at, stream=stream)
    to.numpy()[:], at.numpy()[:] = [7, 1, 4], [2, 3, 6]
    gate.open()
    request.synchronize()
    assert numpy.array_equal(in_bytes(dst)[[7, 1, 4]], in_bytes(src)[[2, 3, 6]])


@pytest.mark.parametrize("on_gpu", ["int32", "int64"])
@pytest.mark.parametrize("on_host", [list, lambda x: numpy.array(x, "int32"), lambda x: numpy.array(x, "int64")])
def test_a_list_on_the_host_takes_the_width_of_the_list_on_the_gpu(on_gpu, on_host):
    dst, src = blocks(8, 0, seed=1), blocks(8, seed=2)
    mpgpu.copy_blocks(dst, src, index_on(0, [7, 1], on_gpu), on_host([2, 3])).synchronize()
    mpgpu.copy_blocks(dst, src, on_host([0, 4]), index_on(0, [5, 5], on_gpu)).synchronize()
    assert numpy.array_equal(in_bytes(dst)[[7, 1, 0, 4]], in_bytes(src)[[2, 3, 5, 5]])


def test_an_index_on_a_gpu_that_is_out_of_range_is_reported_by_the_wait_and_the_others_are_copied():
    dst, src = blocks(8, 0, seed=1), blocks(8, seed=2)
    before = in_bytes(dst).copy()
    request = mpgpu.copy_blocks(dst, src, index_on(0, [7, 8, 2], "int32"), [0, 1, 2])
    for _ in range(2):
        with pytest.raises(mpgpu.ArgumentError, match="index 1 of the destination is 8, but its arrays have 8 blocks"):
            request.synchronize()
    assert numpy.array_equal(in_bytes(dst)[[7, 2]], in_bytes(src)[[0, 2]]) and numpy.array_equal(in_bytes(dst)[3:7], before[3:7])


# --- refusals ---------------------------------------------------------------------------------------------------------------
D, S = blocks(20, 0, seed=1), blocks(10, seed=2)
ON_GPU = {dtype: index_on(0, [0, 1], dtype) for dtype in ("int32", "int64")}
READ_ONLY = blocks(4)
READ_ONLY.flags.writeable = False

REFUSED = [
    (lambda: mpgpu.copy_blocks(D, S, [5, -6], [0, 9]), r"^dst_index\[1\]=-6: must not be negative; indices count blocks from 0 up$"),
    (lambda: mpgpu.copy_blocks(D, S, [5, 6], numpy.array([0, -1], "int32")), r"^src_index\[1\]=-1: must not be negative"),
    (lambda: mpgpu.copy_blocks(D, S, numpy.array([-(2**63)]), [0]), r"^dst_index\[0\]=-9223372036854775808: must not be negative"),
    (lambda: mpgpu.copy_blocks(D, S, [5, 20], [0, 9]), r"^dst_index\[1\]=20: must be less than the number of blocks \(20\)$"),
    (
        lambda: mpgpu.copy_blocks(D, S, [5, 6, 7], numpy.array([0, 9, 10], "uint32")),
        r"^src_index\[2\]=10: must be less than the number of blocks \(10\)$",
    ),
    (lambda: mpgpu.copy_blocks(D, S, [2**64]), r"^dst_index\[0\]=18446744073709551616: must be below 2\*\*63$"),
    (lambda: mpgpu.copy_blocks(D, S, [5, 6], [0]), r"^dst_index has 2 indices and src_index has 1: both must have the same length$"),
    (lambda: mpgpu.copy_blocks(D, S), r"^dst has 20 blocks and src has 10: pass index lists, or arrays with the same number of blocks$"),
    (lambda: mpgpu.copy_blocks(D, S, range(12)), r"^dst_index has 12 indices and src has 10 blocks: pass src_index, or fewer indices$"),
    (lambda: mpgpu.copy_blocks(D[:0], S, [0], [0]), r"^dst_index has 1 indices and dst has no blocks: pass an array with blocks$"),
    (lambda: mpgpu.copy_blocks(D, S, numpy.zeros(1)), r"^dst_index has elements of type float64: convert it to integers of 32 or 64 bits"),
    (lambda: mpgpu.copy_blocks(D, S, numpy.zeros(1, bool)), r"^dst_index has elements of type bool: convert it"),
    (lambda: mpgpu.copy_blocks(D, S, numpy.zeros(1, ">i8")), r"^dst_index has elements of type >i8: convert it"),
    (lambda: mpgpu.copy_blocks(D, S, b"12345678"), r"^dst_index has elements of type raw bytes: convert it"),
    (lambda: mpgpu.copy_blocks(D, S, numpy.zeros((1, 1), int)), r"^dst_index has shape \(1, 1\): an index list must have one dimension$"),
    (
        lambda: mpgpu.copy_blocks(D, S, ON_GPU["int32"], ON_GPU["int64"]),
        r"^dst_index has 32 bits and src_index has 64: convert one of them",
    ),
    (lambda: mpgpu.copy_blocks(D, S, ON_GPU["int32"], [0, 2**40]), r"^src_index\[1\]=1099511627776: does not fit into 32 bits"),
    (lambda: mpgpu.copy_blocks([D, D], [S], [0], [0]), r"^dst has 2 arrays and src has 1: pass one of each for every layer$"),
    (
        lambda: mpgpu.copy_blocks([D, D[:5]], [S, S], [0], [0]),
        r"^dst\[1\] has 5 blocks and dst\[0\] has 20: copy layers that differ in sep",
    ),
    (
        lambda: mpgpu.copy_blocks([D, D], [S, blocks(10, gap=1)], [0], [0]),
        r"^src\[1\] has 36 bytes from one block to the next and src\[0\] has 32",
    ),
    (lambda: mpgpu.copy_blocks([D, blocks(20, shape=(3,))], [S, S], [0], [0]), r"^dst\[1\] has 12 bytes in a block and dst\[0\] has 32"),
    (lambda: mpgpu.copy_blocks(D, blocks(10, shape=(3,)), [0], [0]), r"^a block of dst has 32 bytes and a block of src 12: both must have"),
    (
        lambda: mpgpu.copy_blocks(D, S[:, :, :1], [0], [0]),
        r"^src: a block of shape \(4, 1\) with strides \(8, 4\) bytes is not contiguous: .*; ",
    ),
    (lambda: mpgpu.copy_blocks([D, D[:, ::2]], [S, S], [0], [0]), r"^dst\[1\]: a block of shape \(2, 2\) with strides .* in C order$"),
    (lambda: mpgpu.copy_blocks(D, S[::-1], [0], [0]), r"^src: its blocks are -32 bytes apart and have 32 bytes"),
    (lambda: mpgpu.copy_blocks(D, numpy.broadcast_to(S[:1], (9, 4, 2)), [0], [0]), r"^src: its blocks are 0 bytes apart and have 32 bytes"),
    (lambda: mpgpu.copy_blocks(READ_ONLY, S, [0], [0]), r"^dst is read-only: copy into memory that may be written$"),
    (lambda: mpgpu.copy_blocks(D, mpgpu.empty((), "f4"), [0], [0]), r"^src has no dimensions: its first dimension must count the blocks$"),
    (lambda: mpgpu.copy_blocks(D, S, [0], [0], multiprocessors=0), r"^multiprocessors=0: must be from 1 to 4294967295$"),
    (lambda: mpgpu.copy_blocks(D, S, [0], [0], multiprocessors=-4), r"^multiprocessors=-4: must be from 1"),
    (lambda: mpgpu.copy_blocks(D, S, [0], [0], multiprocessors=2**32), r"^multiprocessors=4294967296: must be from 1"),
    (lambda: mpgpu.copy_blocks(D, S, [0], [0], paced=2), r"^paced=2: must be one of None, True, False$"),
    (
        lambda: mpgpu.copy_blocks(D, S, [0], [0], stream=mpgpu.Stream(0, context=mpgpu.Context()), context=mpgpu.default_context()),
        r"stream",
    ),
]
OF_WRONG_TYPES = [
    (lambda: mpgpu.copy_blocks(3, S), r"^dst is a int: it must have __dlpack__"),
    (lambda: mpgpu.copy_blocks(D, [S, 3]), r"^src\[1\] is a int: it must have __dlpack__"),
    (
        lambda: mpgpu.copy_blocks(D, S, 3),
        r"^dst_index is a int: it must be a list of whole numbers, or an array of integers of 32 or 64 bits$",
    ),
    (lambda: mpgpu.copy_blocks(D, S, [0, 1.5]), r"^dst_index\[1\]=1\.5: must be a whole number"),
    (lambda: mpgpu.copy_blocks(D, S, [True, False]), r"^dst_index\[0\]=True: must be a whole number"),
    (lambda: mpgpu.copy_blocks(D, S, [0], [0], multiprocessors=1.5), r"^multiprocessors=1\.5: must be a whole number"),
    (lambda: mpgpu.copy_blocks(D, S, [0], [0], stream="default"), r"^stream is a str"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_wrong_arguments_are_refused_with_value_and_remedy(call, text):
    before = in_bytes(D).copy()
    with pytest.raises(mpgpu.ArgumentError, match=text):
        call()
    assert numpy.array_equal(in_bytes(D), before)


@pytest.mark.parametrize(("call", "text"), OF_WRONG_TYPES)
def test_arguments_of_wrong_types_are_refused(call, text):
    with pytest.raises(TypeError, match=text):
        call()


# --- streams, requests and lifetimes ----------------------------------------------------------------------------------------
def test_a_copy_runs_in_its_stream_and_its_request_ends_with_it(stream, close):
    dst, src = blocks(4, 0, seed=1), blocks(4, seed=2)
    before = in_bytes(dst).copy()
    gate = close()
    request = mpgpu.copy_blocks(dst, src, stream=stream)
    assert isinstance(request, mpgpu.Request) and not request.done()
    assert numpy.array_equal(in_bytes(dst), before)
    gate.open()
    request.synchronize()
    assert request.done() and numpy.array_equal(in_bytes(dst), in_bytes(src))


def test_copies_in_one_stream_run_in_their_order(stream):
    a, b, c = blocks(50, seed=1), blocks(50, 0, seed=2), blocks(50, seed=3)
    for _ in range(20):
        mpgpu.copy_blocks(b, a, stream=stream)
        mpgpu.copy_blocks(c, b, stream=int(stream), multiprocessors=1, paced=False)
    stream.synchronize()
    assert numpy.array_equal(in_bytes(c), in_bytes(a))


def test_an_index_list_on_the_host_may_be_changed_after_the_call(stream, close):
    dst, src = blocks(4, 0, seed=1), blocks(4, seed=2)
    at = numpy.array([3, 2])
    gate = close()
    request = mpgpu.copy_blocks(dst, src, [0, 1], at, stream=stream)
    at[:] = 0
    gate.open()
    request.synchronize()
    assert numpy.array_equal(in_bytes(dst)[:2], in_bytes(src)[[3, 2]])


def test_the_context_is_that_of_the_buffers_or_of_the_stream():
    context = mpgpu.Context()
    dst, src = context.empty((4, 8), device=0), context.empty((4, 8))
    mpgpu.copy_blocks(dst, src).synchronize()
    stream = mpgpu.Stream(0, context=context)
    mpgpu.copy_blocks(dst.numpy(), src.numpy(), stream=stream).synchronize()
    mpgpu.copy_blocks(dst.numpy(), src.numpy(), context=context).synchronize()
    with pytest.raises(mpgpu.ArgumentError, match="another context"):
        mpgpu.copy_blocks(dst, mpgpu.empty((4, 8)))


class Owned(numpy.ndarray):
    """Array whose lifetime can be observed."""


def test_arrays_and_index_lists_on_a_gpu_live_until_a_copy_that_nobody_holds_is_done(stream, close):
    dst = blocks(4, 0, seed=1)
    src, index = blocks(4, seed=2).view(Owned), index_on(0, [3, 1], "int64").numpy().view(Owned)
    wanted = in_bytes(src)[[3, 1]].copy()
    alive = [weakref.ref(src), weakref.ref(index)]
    gate = close()
    mpgpu.copy_blocks(dst, src, None, index, stream=stream)
    del src, index
    gc.collect()
    assert all(each() is not None for each in alive)
    gate.open()
    stream.synchronize()
    finished()
    assert [each() for each in alive] == [None, None]
    assert numpy.array_equal(in_bytes(dst)[:2], wanted)


# --- torch ------------------------------------------------------------------------------------------------------------------
def tensors_of(torch, count, device=mpgpu.HOST, **options):
    return torch.from_numpy(blocks(count, device, **options))


def test_tensors_and_parameters_are_copied():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dst, src = tensors_of(torch, 6, 0, gap=2, seed=1), tensors_of(torch, 6, seed=2)
    for to, at in (([5, 0], torch.tensor([1, 2])), (torch.tensor([3, 4], dtype=torch.int32), [1, 2]), (torch.arange(8)[1:5:2], [3, 0])):
        mpgpu.copy_blocks(dst, torch.nn.Parameter(src), to, at).synchronize()
        assert numpy.array_equal(in_bytes(dst.numpy())[list(map(int, to))], in_bytes(src.numpy())[list(map(int, at))])
    views = [src[1:4], src[2:5]]
    mpgpu.copy_blocks([dst[:3], dst[3:]], views).synchronize()
    assert numpy.array_equal(in_bytes(dst.numpy()), in_bytes(torch.cat(views).numpy()))


def test_tensors_that_cannot_be_copied_are_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dst, src = tensors_of(torch, 6, 0, shape=(4, 2)), tensors_of(torch, 6)
    for wrong, text in (
        (src.transpose(1, 2), r"^src: a block of shape \(2, 4\) with strides \(4, 8\) bytes is not contiguous"),
        (src.expand(2, 6, 4, 2)[:, 0], r"^src: its blocks are 0 bytes apart"),
        (src.to_sparse(), r"^src: a tensor of layout"),
        (src.to("meta"), r"^src: a tensor on meta"),
        (torch.zeros(6, 4, dtype=torch.complex64).conj(), r"^src: .*conjugate"),
        (torch.zeros(()), r"^src has no dimensions"),
        (torch.zeros(6, 4, 2), r"pageable or unknown memory"),
    ):
        with pytest.raises(mpgpu.ArgumentError, match=text):
            mpgpu.copy_blocks(dst, wrong, [0], [0])
    for wrong, text in (
        (torch.tensor([0, -1]), r"^dst_index\[1\]=-1: must not be negative"),
        (torch.tensor([0, 6]), r"^dst_index\[1\]=6: must be less than the number of blocks"),
        (torch.tensor([True]), r"^dst_index has elements of type torch.bool"),
        (torch.tensor([[0]]), r"^dst_index has shape \(1, 1\)"),
    ):
        with pytest.raises(mpgpu.ArgumentError, match=text):
            mpgpu.copy_blocks(dst, src, wrong)


def test_a_storage_that_is_released_is_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dst, src = tensors_of(torch, 6, 0), torch.zeros(6, 4, 2)
    src.untyped_storage().resize_(0)
    with pytest.raises(mpgpu.ArgumentError, match=r"^src: the storage of the tensor has 0 bytes"):
        mpgpu.copy_blocks(dst, src)
