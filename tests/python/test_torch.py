# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests CPU tensors if torch is installed; tests/gpu/python.py tests those on GPUs."""

from __future__ import annotations

import mpgpu
import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402


def test_cpu_tensors_of_every_type_are_copied():
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.bool):
        src, dst = torch.arange(1000).to(dtype), torch.zeros(1000, dtype=dtype)
        mpgpu.copy(dst, src)
        assert torch.equal(dst, src)


def test_a_tensor_that_needs_a_gradient_is_read_and_written():
    parameter = torch.nn.Parameter(torch.ones(10))
    dst = torch.zeros(10)
    mpgpu.copy(dst, parameter)
    assert dst.sum() == 10
    mpgpu.copy(parameter, torch.zeros(10))
    assert parameter.sum() == 0


def test_a_tensor_that_is_given_other_memory_keeps_its_first_while_a_plan_has_it():
    parameter, dst = torch.nn.Parameter(torch.full((1000,), 1.0)), torch.zeros(1000)
    plan = mpgpu.Plan([(dst, parameter)])
    parameter.data = torch.full((1000,), 2.0)
    plan.execute().synchronize()
    assert bool((dst == 1).all())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(4, 4).t()[:2], r"copy x\.contiguous\(\) instead"),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj(), r"resolve_conj"),
        (lambda: torch.zeros(4).to_sparse(), r"layout torch\.sparse_coo"),
        (lambda: torch.zeros(4, device="meta"), r"a tensor on meta"),
    ],
)
def test_tensors_without_plain_memory_are_refused(make, text):
    with pytest.raises(mpgpu.ArgumentError, match=text):
        mpgpu.copy(bytearray(32), make())


def test_a_tensor_and_its_conjugate_are_two():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    moved = mpgpu.torch.to({"a": tensor, "b": tensor.conj(), "c": tensor.conj().imag, "d": tensor.imag}, "cpu")
    assert torch.equal(moved["b"], tensor.conj().resolve_conj()) and torch.equal(moved["a"], tensor)
    assert moved["c"].tolist() == [-2, 4] and moved["d"].tolist() == [2, -4]


def test_a_state_dict_keeps_its_form():
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.BatchNorm1d(50))
    state = model.state_dict()
    state["tied"] = state["0.weight"]
    state["extra"] = {"empty": torch.empty(0, 5), "number": 7, "list": [torch.arange(3), (torch.arange(6).view(2, 3).t(),)]}
    for moved in (mpgpu.torch.to(state, "cpu"), mpgpu.torch.pin(state)):
        assert type(moved) is type(state)
        assert moved._metadata == state._metadata
        assert moved["tied"].data_ptr() == moved["0.weight"].data_ptr() != state["tied"].data_ptr()
        assert moved["extra"]["number"] == 7
        assert moved["extra"]["empty"].shape == (0, 5)
        assert torch.equal(moved["extra"]["list"][1][0], state["extra"]["list"][1][0])
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(moved[name], tensor)
        model.load_state_dict({name: tensor for name, tensor in moved.items() if name not in ("tied", "extra")})


def test_a_tree_goes_to_several_devices_or_its_keys_to_one_each():
    state = {"a": torch.arange(1 << 19), "b": torch.arange(6).view(2, 3).t(), "tied": None, "n": 7}
    state["tied"] = state["a"]
    copies = mpgpu.torch.to(state, ["cpu", torch.device("cpu"), "cpu"])
    assert len({copy["a"].data_ptr() for copy in [state, *copies]}) == 4
    for moved in [*copies, mpgpu.torch.to(state, dict.fromkeys(state, "cpu"))]:
        assert list(moved) == list(state) and moved["n"] == 7
        assert torch.equal(moved["a"], state["a"]) and torch.equal(moved["b"], state["b"])
        assert moved["tied"].data_ptr() == moved["a"].data_ptr()
    assert mpgpu.torch.to(state, []) == []
    for device in ({"a": "cpu"}, dict.fromkeys([*state, "c"], "cpu")):
        with pytest.raises(mpgpu.ArgumentError, match="is in only one of the two"):
            mpgpu.torch.to(state, device)
    with pytest.raises(mpgpu.ArgumentError, match="the tree, which is a Tensor: pass a dict"):
        mpgpu.torch.to(state["a"], {"a": "cpu"})
    with pytest.raises(mpgpu.ArgumentError, match="torch sees"):
        mpgpu.torch.to(state, ["cpu", "cuda:99"])


def test_tensors_that_are_tied_in_both_trees_are_copied_once():
    weight = torch.arange(100)
    src = {"in": weight, "out": weight}
    dst = mpgpu.torch.empty_like(src)
    mpgpu.torch.copy(dst, src)
    assert torch.equal(dst["out"], weight)
    assert mpgpu.torch.plan(dst, src).info.bytes == weight.nbytes


def test_trees_of_different_form_are_refused():
    with pytest.raises(mpgpu.ArgumentError, match=r"\['a'\]\[1\]: dst is \(5,\) of torch.float32 and src \(3,\) of torch.float32"):
        mpgpu.torch.copy({"a": [torch.zeros(1), torch.zeros(5)]}, {"a": [torch.zeros(1), torch.zeros(3)]})
    with pytest.raises(mpgpu.ArgumentError, match=r"the tree: only one of dst and src has 'b'"):
        mpgpu.torch.copy({"a": torch.zeros(5)}, {"a": torch.zeros(5), "b": 1})
    with pytest.raises(mpgpu.ArgumentError, match=r"the tree: dst has 1 entries and src 2"):
        mpgpu.torch.copy([torch.zeros(5)], [torch.zeros(5), torch.zeros(5)])


def test_pinned_memory_is_of_the_host():
    tensor = mpgpu.torch.empty((3, 5), torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == ((3, 5), torch.bfloat16)
    assert mpgpu.torch.empty(0).shape == (0,)
    with pytest.raises(mpgpu.ArgumentError, match="device=0: pinned memory is host memory"):
        mpgpu.torch.empty(4, device=0)


def test_types_and_devices_of_torch_are_understood():
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float8_e5m2):
        buffer = mpgpu.empty((2, 3), dtype, torch.device("cpu"))
        tensor = torch.from_dlpack(buffer) if dtype != torch.float8_e5m2 and dtype != torch.bool else None
        if tensor is not None:
            assert (tensor.dtype, tuple(tensor.shape), tensor.data_ptr()) == (dtype, (2, 3), buffer.address)
        mpgpu.copy(buffer, torch.zeros(2, 3, dtype=dtype))
        mpgpu.copy(torch.zeros(2, 3, dtype=dtype), buffer)
    assert mpgpu.empty(4, device=torch.device("cuda", 1)).device == 1
    assert mpgpu.torch.empty(4, device="cpu").shape == (4,)
    assert mpgpu.torch.to(torch.ones(3), mpgpu.HOST).tolist() == [1, 1, 1]


def test_tensors_of_unlike_types_and_shapes_are_refused_unless_bytes_are_asked_for():
    for dst, src in (
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4), numpy.zeros(4, "i4")),
        (torch.zeros(2, 2), torch.zeros(4)),
        (mpgpu.empty(4, "i4"), torch.zeros(4)),
    ):
        with pytest.raises(mpgpu.ArgumentError, match="pass as_bytes=True"):
            mpgpu.copy(dst, src)
        mpgpu.copy(dst, src, as_bytes=True)
    mpgpu.copy(torch.zeros(4), numpy.ones(4, "f4"))
    mpgpu.copy(numpy.zeros(4, "f4"), torch.ones(4))
