# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the trees of tensors that mpgpu.torch accepts, and those that it refuses by name."""

from __future__ import annotations

import argparse
import dataclasses
import io
import re
import sys
from collections import deque

import mpgpu
import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402


@dataclasses.dataclass
class Weights:
    first: object


class Wrapper(torch.Tensor):
    """Tensor subclass without memory that represents another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(value):
            return value.inner if isinstance(value, Wrapper) else value

        made = function(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})
        return Wrapper(made) if isinstance(made, torch.Tensor) else made


def model():
    return torch.nn.Linear(4, 4)


def tensor():
    return torch.ones(4)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4)


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


NO_TREES = [
    (model, "is a Linear, .*: pass x.state_dict()"),
    (lambda: torch.optim.SGD(model().parameters(), lr=0.1), "is a SGD, .*: pass x.state_dict()"),
    (lambda: model().parameters(), "is a generator, .*: pass list(x)"),
    (lambda: {"a": tensor()}.values(), "is a dict_values, .*: pass list(x)"),
    (lambda: map(torch.zeros_like, [tensor()]), "is a map, .*: pass list(x)"),
    (lambda: {tensor()}, "is a set, .*: pass list(x)"),
    (lambda: deque([tensor()]), "is a deque, .*: pass list(x)"),
    (lambda: numpy.ones(4), "is a ndarray, .*: pass torch.as_tensor(x)"),
    (lambda: mpgpu.empty(4, "f4"), "is a Buffer, .*: pass torch.as_tensor(x)"),
    (lambda: memoryview(b"1234"), "is a memoryview, .*: pass torch.frombuffer(x"),
    (lambda: tensor().untyped_storage(), "is a UntypedStorage, .*: pass a tensor that has it"),
    (lambda: Weights(tensor()), "is a Weights, .*: pass a dict of the tensors that it holds"),
    (lambda: argparse.Namespace(layers=[tensor()]), "is a Namespace, .*: pass a dict of the tensors"),
]

WITHOUT_MEMORY = [
    (lambda: Wrapper(tensor()), "a Wrapper has no memory of its own: pass the tensors that it wraps, x.inner"),
    (fake, "a FakeTensor has a shape and no memory"),
    (lambda: tensor().to_sparse(), "a tensor of layout torch.sparse_coo has no single range of memory: pass x.coalesce().indices() and"),
    (
        lambda: torch.ones(4, 4).to_sparse_csr(),
        "a tensor of layout torch.sparse_csr .*: pass x.crow_indices(), x.col_indices() and x.values()",
    ),
    (lambda: nested(torch.strided), "a nested tensor .*: pass its parts, x.unbind()"),
    (lambda: nested(torch.jagged), "a nested tensor .*: pass its parts, x.unbind()"),
    (lambda: torch.quantize_per_tensor(tensor(), 0.1, 0, torch.qint8), "a quantized tensor .*: pass x.int_repr(), or x.dequantize()"),
    (lambda: torch.empty(4, device="meta"), "a tensor on meta has a shape and no memory: pass a tensor that is allocated"),
]

CALLS = [
    lambda tree: mpgpu.torch.to(tree, "cpu"),
    lambda tree: mpgpu.torch.to(tree, ["cpu", "cpu"]),
    lambda tree: mpgpu.torch.pin(tree),
    lambda tree: mpgpu.torch.copy(tree, tree),
    lambda tree: mpgpu.torch.plan(tree, tree),
]


def escaped(text):
    return re.escape(text).replace(r"\.\*", ".*")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "text"), [*NO_TREES, *WITHOUT_MEMORY])
def test_what_is_no_tree_or_has_no_memory_is_refused_by_name(make, text):
    for call in CALLS:
        with pytest.raises(mpgpu.ArgumentError, match=escaped(text)):
            call(make())
        for inside, where in (({"a": [tensor(), make()]}, "['a'][1]"), ((1, make()), "[1]")):
            with pytest.raises(mpgpu.ArgumentError, match=rf"^(tree|dst){re.escape(where)}:? .*{escaped(text)}"):
                call(inside)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "text"), WITHOUT_MEMORY)
def test_copies_of_tensors_without_memory_are_refused_by_name(make, text):
    with pytest.raises(mpgpu.ArgumentError, match="src of transfer 0: " + escaped(text)):
        mpgpu.copy(bytearray(16), make())


@pytest.mark.parametrize("value", [None, 7, "model.pt", b"bytes", 1.5])
def test_what_has_no_tensors_is_no_tree_alone(value):
    for call in CALLS:
        with pytest.raises(
            mpgpu.ArgumentError, match=r"which is not a tree of tensors: pass a tensor, or a dict, list or tuple of tensors"
        ):
            call(value)


def test_values_without_memory_stay_as_they_are():
    values = [None, True, 7, 1.5, 2j, "text", b"bytes", numpy.float32(3), torch.float32, torch.device("cpu"), torch.Size([2]), slice(3)]
    values += [io.BytesIO(b"state"), {1, 2}, argparse.Namespace(rate=0.1, names=["a"]), range(3), Weights(5), int, sys]
    tree = {"tensor": tensor(), "values": values}
    for moved in (mpgpu.torch.to(tree, "cpu"), mpgpu.torch.pin(tree), mpgpu.torch.empty_like(tree)):
        assert moved["values"] == values
    assert mpgpu.torch.to([], "cpu") == [] and mpgpu.torch.pin({}) == {}


def test_tensors_that_wrap_others_are_never_taken_for_one():
    tree = [Wrapper(torch.full((4,), 1.0)), Wrapper(torch.full((4,), 2.0))]
    for call in CALLS:
        with pytest.raises(mpgpu.ArgumentError, match="a Wrapper has no memory of its own"):
            call(tree)


def test_shapes_on_meta_are_enough_for_memory_that_is_like_them():
    weight = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    made = mpgpu.torch.empty_like({"in": weight, "tied": weight.detach(), "other": torch.empty(3, 5, device="meta", dtype=torch.bfloat16)})
    assert made["in"].shape == (3, 5) and made["in"].dtype == torch.bfloat16 and made["in"].device.type == "cpu"
    assert made["in"].data_ptr() == made["tied"].data_ptr() != made["other"].data_ptr()


def test_a_tensor_of_a_node_of_ranks_is_refused_by_its_part():
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    tensors = pytest.importorskip("torch.distributed.tensor")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        spread = tensors.distribute_tensor(tensor(), mesh, [tensors.Shard(0)])
        for call in (*CALLS, lambda tree: mpgpu.copy(bytearray(16), tree["x"])):
            with pytest.raises(mpgpu.ArgumentError, match=r"a DTensor is spread over ranks: pass this rank's part, x\.to_local\(\)"):
                call({"x": spread})
        assert mpgpu.torch.to(spread.to_local(), "cpu").sum() == 4
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("mps", r"device='mps': mpgpu supports the CPU and CUDA devices: move tensors there from 'cpu' by x\.to\('mps'\)"),
        ("meta", r"device='meta': mpgpu supports the CPU and CUDA devices"),
        (torch.device("xpu", 1), r"mpgpu supports the CPU and CUDA devices: .*x\.to\('xpu:1'\)"),
        ("cuda:-1", r"device='cuda:-1': "),
        (-2, r"device=-2: torch has one device for the host: pass mpgpu\.HOST or 'cpu'"),
        (2**40, r"device=1099511627776: "),
        (True, r"device=True: "),
        (None, r"device=None: "),
        (1.5, r"device=1\.5: "),
    ],
)
def test_devices_that_torch_or_mpgpu_lacks_are_refused(device, text):
    with pytest.raises(mpgpu.ArgumentError, match=text):
        mpgpu.torch.to(tensor(), device)
    with pytest.raises(mpgpu.ArgumentError, match=text):
        mpgpu.torch.to({"a": tensor()}, {"a": device})


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((-4,), ValueError, r"size=-4: must not be negative"),
        (((-1, -1),), ValueError, r"size=\(-1, -1\): must not be negative"),
        ((1.5,), TypeError, r"size=1\.5: must be a whole number, or one for each dimension"),
        ((1 << 62,), MemoryError, r"."),
        ((4, "float32"), ValueError, r"dtype='float32': must be a type of torch"),
    ],
)
def test_pinned_tensors_of_odd_sizes_and_types_are_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        mpgpu.torch.empty(*arguments)
    assert mpgpu.torch.empty(numpy.int64(3)).shape == mpgpu.torch.empty(torch.Size([3])).shape == (3,)
