# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests storages of torch that lose their memory while they are in use, as by `resize_` in FSDP."""

from __future__ import annotations

import mpgpu
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

COUNT = 1 << 14
NODE = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own])


def ends():
    return torch.zeros(COUNT), torch.full((COUNT,), 9.0)


def free(tensor):
    """Frees a tensor's memory, creates other tensors that reuse the memory, and returns these."""
    tensor.untyped_storage().resize_(0)
    return [torch.zeros(COUNT) for _ in range(8)]


@pytest.mark.parametrize("end", ["dst", "src"])
def test_a_plan_whose_tensor_lost_its_memory_is_refused_and_writes_nothing(end):
    dst, src = ends()
    plan = mpgpu.Plan([(dst, src)])
    others = free(dst if end == "dst" else src)
    with pytest.raises(
        mpgpu.ArgumentError, match=rf"^{end} of transfer 0: the storage .* had 65536 bytes .*, and has 0 at 0x0 now"
    ) as caught:
        plan.execute()
    assert caught.value.status == "MP_ERROR_INVALID_POINTER"
    assert not any((other == 9).any() for other in others)


def test_a_view_goes_with_the_storage_of_its_base():
    (base, src), second = ends(), torch.zeros(COUNT)
    plan = mpgpu.Plan([(second, src), (base[16:32], src[:16]), (base[64:80], src[:16])])
    plan.execute().synchronize()
    assert (base[16:32] == 9).all() and (base[64:80] == 9).all()
    free(base)
    with pytest.raises(mpgpu.ArgumentError, match="dst of transfer 1: the storage"):
        plan.execute()
    assert second[0] == 9


def test_a_storage_that_has_its_memory_again_needs_a_new_plan_where_that_is_another():
    dst, src = ends()
    plan = mpgpu.Plan([(dst, src)])
    before = dst.data_ptr()
    others = free(dst)
    dst.untyped_storage().resize_(4 * COUNT)
    if dst.data_ptr() == before:
        plan.execute().synchronize()
    else:
        with pytest.raises(mpgpu.ArgumentError, match="plan again while the tensor has memory"):
            plan.execute()
        mpgpu.Plan([(dst, src)]).execute().synchronize()
    assert (dst == 9).all() and not any((other == 9).any() for other in others)


def test_a_storage_that_has_shrunk_or_moved_is_refused():
    dst, src = ends()
    plan = mpgpu.Plan([(dst, src)])
    dst.untyped_storage().resize_(2 * COUNT)
    with pytest.raises(mpgpu.ArgumentError, match=r"had 65536 bytes .*, and has 32768"):
        plan.execute()
    dst, src = ends()
    plan = mpgpu.Plan([(dst, src)])
    dst.share_memory_()
    with pytest.raises(mpgpu.ArgumentError, match=r"had 65536 bytes .*, and has 65536"):
        plan.execute()


def test_a_tensor_that_is_given_another_storage_leaves_the_plan_with_its_first():
    (dst, src), (other, _) = ends(), ends()
    first, plan = dst.view(-1), mpgpu.Plan([(dst, src)])
    dst.set_(other)
    plan.execute().synchronize()
    assert (first == 9).all() and not other.any()


@pytest.mark.parametrize("is_view", [False, True])
def test_a_tensor_without_memory_is_refused_by_every_call(is_view):
    base, src = ends()
    dst = base[16:] if is_view else base
    free(base)
    for call in (
        lambda: mpgpu.copy(dst, src[: len(dst)]),
        lambda: mpgpu.copy(torch.zeros(len(dst)), dst),
        lambda: mpgpu.broadcast(src[: len(dst)], [dst]),
        lambda: mpgpu.Channel(NODE, 0).send(dst),
        lambda: mpgpu.Channel(NODE, 0).receive(dst),
        lambda: mpgpu.Registered(dst),
        lambda: NODE.plan([dst], []),
    ):
        with pytest.raises(mpgpu.ArgumentError, match=r"the storage of the tensor has 0 bytes"):
            call()


def test_plans_of_a_node_and_parts_of_its_collectives_are_refused_too():
    dst, src = ends()
    plan = NODE.plan_exchange([mpgpu.send_to(0, src), mpgpu.receive_from(0, dst)])
    plan.execute().synchronize()
    assert (dst == 9).all()
    others = free(dst)
    with pytest.raises(mpgpu.ArgumentError, match=r"^half 1: the storage of the tensor had"):
        plan.execute()
    dst, src = ends()
    halves = NODE.all_to_all(src, dst)
    others += free(dst)
    with pytest.raises(mpgpu.ArgumentError, match=r"^destination: the storage of the tensor has 0 bytes"):
        NODE.plan_exchange(halves)
    assert not any((other == 9).any() for other in others)
