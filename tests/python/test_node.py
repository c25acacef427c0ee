# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests node plans with two to four processes, which connect by pipes, a socket or MPI."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import traceback
import weakref
from multiprocessing.connection import Connection

import mpgpu
import numpy
import pytest

COUNT = 3 << 20
STEPS = 5


class Hub:
    """Allgather function that uses pipes. Every rank sends its data to rank 0, which sends all data to every rank."""

    def __init__(self, rank: int, pipes: list[Connection]) -> None:
        self.rank, self.pipes = rank, pipes

    def __call__(self, own: bytes) -> list[bytes]:
        if self.rank:
            self.pipes[0].send_bytes(own)
            return self.pipes[0].recv()
        gathered = [own, *(pipe.recv_bytes() for pipe in self.pipes)]
        for pipe in self.pipes:
            pipe.send(gathered)
        return gathered


def pattern(rank, step, count):
    return numpy.random.default_rng(1000 * rank + step).integers(0, 256, count, dtype=numpy.uint8)


def ring(node, count, device):
    """Makes every rank send a different pattern to the next rank in every step, and checks every byte that a rank receives."""
    context = node.context
    right, left = (node.rank + 1) % node.ranks, (node.rank - 1) % node.ranks
    sent = context.empty(count, device=device, shared=True)
    received = context.empty(count + 10, device=device, shared=True)
    plan = node.plan([sent, received], [((right, 1, 10), (node.rank, 0), count)], max_paths=None)
    assert isinstance(plan, mpgpu.NodePlan)
    assert f"{node.ranks} transfer" in plan.describe()
    received.numpy()[:] = 0
    stream = mpgpu.Stream(max(device, 0), context=context)
    plan.prepare(stream)
    for step in range(STEPS):
        sent.numpy()[:] = pattern(node.rank, step, count)
        plan.execute(stream).synchronize()
        assert numpy.array_equal(received.numpy()[10:], pattern(left, step, count))
    assert not received.numpy()[:10].any()
    # Dropping the plan waits, because other ranks may still read this rank's memory in their last step.
    del plan
    gc.collect()


def by_pipes(rank, ranks, pipes, _):
    node = mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes))
    assert (node.rank, node.ranks) == (rank, ranks)
    ring(node, COUNT, rank)


def by_pipes_on_the_host(rank, ranks, pipes, _):
    ring(mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes)), COUNT, mpgpu.HOST)


def by_socket(rank, ranks, _, folder):
    ring(mpgpu.Node(rank=rank, ranks=ranks, socket=folder / "ranks", devices=[rank]), COUNT, rank)


def by_halves(rank, ranks, pipes, _):
    """Tests plans of ranks that do not know the others' memory.

    Each rank sends two messages with one tag to the next rank, and one with another tag to the previous rank.
    """
    node = mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes))
    # All ranks see all GPUs, and there are more GPUs than ranks.
    assert rank in node.devices
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    sent, received = ([mpgpu.empty(COUNT // 4 + i, device=rank, shared=True) for i in range(3)] for _ in range(2))
    plan = node.plan_exchange(
        [
            mpgpu.receive_from(left, received[0], 7),
            mpgpu.send_to(right, sent[0], 7),
            mpgpu.send_to(right, sent[1], 7),
            mpgpu.receive_from(left, received[1], 7),
            mpgpu.send_to(left, sent[2]),
            mpgpu.receive_from(right, received[2]),
        ]
    )
    for step in range(STEPS):
        for i, memory in enumerate(sent):
            memory.numpy()[:] = pattern(10 * rank + i, step, COUNT // 4 + i)
        plan.execute().synchronize()
        for i, memory in enumerate(received):
            source = right if i == 2 else left
            assert numpy.array_equal(memory.numpy(), pattern(10 * source + i, step, COUNT // 4 + i))
    with pytest.raises(mpgpu.Error, match=r"tag 3, but that rank has no matching send in its transfers"):
        node.plan_exchange([mpgpu.receive_from(left, received[0], 3)])
    with pytest.raises(mpgpu.Error, match="half 0 is read-only"):
        node.plan_exchange([mpgpu.receive_from(left, bytes(10))])


def collectives(rank, ranks, pipes, _):
    """Tests each collective with few bytes, and with so many bytes that ranks forward them."""
    node = mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes))
    root = ranks - 1
    for count in (12, 1 << 20):
        one, many, other = (mpgpu.empty(size, device=rank, shared=True) for size in (count, ranks * count, ranks * count))

        def run(halves):
            node.plan_exchange(halves).execute().synchronize()

        def of(ranks, step, count=count):
            return numpy.concatenate([pattern(each, step, count) for each in ranks])

        one.numpy()[:] = pattern(rank, 1, count)
        run(node.broadcast(one, root))
        assert numpy.array_equal(one.numpy(), pattern(root, 1, count))
        one.numpy()[:] = pattern(rank, 2, count)
        run(node.all_gather(one, many))
        assert numpy.array_equal(many.numpy(), of(range(ranks), 2))
        run(node.gather(one, other if rank == root else None, root))
        assert rank != root or numpy.array_equal(other.numpy(), of(range(ranks), 2))
        one.numpy()[:] = 0
        run(node.scatter(many if rank == root else None, one, root))
        assert numpy.array_equal(one.numpy(), pattern(rank, 2, count))
        many.numpy()[:] = of([10 * rank + other for other in range(ranks)], 3)
        run(node.all_to_all(many, other))
        assert numpy.array_equal(other.numpy(), of([10 * other + rank for other in range(ranks)], 3))
        # Each rank sends all elements to the next rank.
        sent, received = [0] * ranks, [0] * ranks
        sent[(rank + 1) % ranks] = received[(rank - 1) % ranks] = ranks * count
        run(node.all_to_all(many, other, sent=sent, received=received))
        assert numpy.array_equal(other.numpy(), of([10 * ((rank - 1) % ranks) + other for other in range(ranks)], 3))
    # The error is raised on all ranks, and no rank starts the collective.
    with pytest.raises(mpgpu.Error, match=r"root=9: must be from 0 to"):
        node.broadcast(one, 9)
    for sizes, reason in (
        ([count] * (ranks - 1), f"{ranks - 1} sizes for {ranks} ranks: pass one for each"),
        ([count - 1] * ranks, f"has {count} bytes, but {count - 1} are transferred there"),
        ([count + 1] * ranks, f"has {count} bytes, but {count + 1} are transferred there"),
    ):
        with pytest.raises(mpgpu.ArgumentError, match=reason):
            node.all_gather(one, many, sizes=sizes)
        with pytest.raises(mpgpu.ArgumentError, match=reason):
            node.scatter(many, one, root, sizes=sizes)
    # The error of one rank is also raised on the other ranks, which are already in the call.
    with pytest.raises(mpgpu.Error, match="add up"):
        node.plan_exchange(node.all_to_all(many, other, sent=[1] * ranks if rank == 0 else None))


def joined(rank, ranks, pipes, _):
    """Tests an allgather function that returns the bytes of all ranks as one object."""
    hub = Hub(rank, pipes)
    ring(mpgpu.Node(rank=rank, ranks=ranks, allgather=lambda own: b"".join(hub(own))), 1000, rank)


def one_is_wrong(rank, ranks, pipes, _):
    """Tests that an error of one rank that is found before the library is called is raised on all ranks, and that no rank waits."""
    node = mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes))
    window = bytes(10) if rank == 1 else bytearray(10)
    with refused(rank, mpgpu.ArgumentError, "window 0 is read-only"):
        node.plan([window], [])
    with refused(rank, TypeError, "transfer 0 is 7"):
        node.plan([], [7] if rank == 1 else [])
    with refused(rank, mpgpu.ArgumentError, "engine='steam'"):
        node.plan([], [], engine="steam" if rank == 1 else None)
    with refused(rank, mpgpu.ArgumentError, "max_paths=1, but rank 0 has max_paths=all"):
        node.plan([], [], max_paths=1 if rank == 1 else None)
    with refused(rank, TypeError, "operations='many'"):
        mpgpu.Messenger(node, operations="many" if rank == 1 else 8)
    if rank == 1:
        node.fail("it has no memory")
    else:
        with pytest.raises(mpgpu.RankError, match=r"^rank 1: it has no memory"):
            node.plan([], [])
    # The node is still usable for the next plan.
    ring(node, 100, rank)


def refused(rank, kind, text):
    """Expects the error itself on rank 1, and a reference to rank 1 on the other ranks."""
    return pytest.raises(kind if rank == 1 else mpgpu.RankError, match=text if rank == 1 else rf"^rank 1: .*{text}")


def one_makes_no_node(rank, ranks, pipes, folder):
    """Tests that an error that prevents one rank from creating a node is raised on all ranks, and that no rank waits."""
    for found in ({"allgather": Hub(rank, pipes)}, {"socket": folder / "ranks"}):
        for devices in (["metal"], [1 << 40], 7):
            with refused(rank, (TypeError, ValueError), ""):
                mpgpu.Node(rank=rank, ranks=ranks, devices=devices if rank == 1 else None, **found)
        with refused(rank, mpgpu.ArgumentError, "is not a GPU"):
            mpgpu.Node(rank=rank, ranks=ranks, devices=[mpgpu.HOST] if rank == 1 else None, **found)
        ring(mpgpu.Node(rank=rank, ranks=ranks, **found), 100, rank)


def one_is_refused(rank, ranks, pipes, _):
    """Tests errors that the library detects on one rank."""
    node = mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes))
    moved = [((0, 7), (1, 0), 10)] if rank == 1 else []
    with refused(
        rank,
        mpgpu.ArgumentError,
        r"transfer 0: the destination is in window 7 of rank 0, but that rank has passed no window \(memory range\) with this number",
    ):
        node.plan([mpgpu.empty(10, device=rank)], moved)


def host_memory_is_not_shared(rank, ranks, pipes, _):
    """Tests that host memory for other ranks must be allocated by an explicit call, of any size, and that the error names this call."""
    node = mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes))
    for size in (10, 5 << 20):
        window = mpgpu.empty(size, shared=rank == 0)
        with pytest.raises(mpgpu.NotSupported, match="allocate it as memory shared between processes"):
            node.plan([window], [((1, 0), (0, 0), 10)] if rank == 0 else [])
    # The node is still usable for the next plan.
    ring(node, 100, rank)


def allgather_fails(rank, ranks, pipes, _):
    """Tests that an exception of the allgather function becomes the cause of the call's exception."""

    def fails(own):
        raise OSError("the network is down")

    with pytest.raises(mpgpu.RankError) as caught:
        mpgpu.Node(rank=rank, ranks=ranks, allgather=fails)
    assert caught.value.status == "MP_ERROR_ALLGATHER"
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(mpgpu.RankError) as caught:
        mpgpu.Node(rank=rank, ranks=ranks, allgather=lambda own: own)
    assert "the allgather gave" in str(caught.value.__cause__)


def peer_ends(rank, ranks, pipes, _):
    """Tests that a rank's exit between steps is reported, and that no rank waits for it."""
    node = mpgpu.Node(rank=rank, ranks=ranks, allgather=Hub(rank, pipes))
    window = mpgpu.empty(100, device=rank, shared=True)
    plan = node.plan([window, mpgpu.empty(100, device=rank, shared=True)], [(((rank + 1) % ranks, 1), (rank, 0), 100)])
    plan.execute().synchronize()
    if rank == 1:
        os._exit(0)
    with pytest.raises(mpgpu.PeerGone):
        for _ in range(1000):
            plan.execute().synchronize()


def run(rank, ranks, pipes, folder, scenario, result):
    try:
        scenario(rank, ranks, pipes, folder)
        result.send(None)
    except BaseException:
        result.send(traceback.format_exc())


def start(ranks, scenario, folder, killed=()):
    """Runs a scenario in `ranks` processes, and raises the exceptions of any of them. The ranks `killed` may end without a result."""
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(ranks - 1)]
    results = [spawn.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        spawn.Process(
            target=run,
            args=(rank, ranks, [end for end, _ in ends] if rank == 0 else [ends[rank - 1][1]], folder, scenario, results[rank][1]),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for _, result in results:
        result.close()
    answers = []
    for rank, (answer, _) in enumerate(results):
        try:
            answers.append(answer.recv() if answer.poll(100) else f"rank {rank} did not come to an end")
        except EOFError:
            answers.append(None if rank in killed else f"rank {rank} ended without a word")
    for process in processes:
        process.join(30)
        if process.is_alive():
            process.kill()
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("scenario", [by_pipes, by_socket, by_halves, collectives])
def test_ranks_that_plan_together_receive_every_byte_of_every_step(scenario, ranks, tmp_path):
    start(ranks, scenario, tmp_path)


@pytest.mark.parametrize(
    "scenario",
    [by_pipes_on_the_host, joined, one_is_wrong, one_makes_no_node, one_is_refused, host_memory_is_not_shared, allgather_fails],
)
def test_two_ranks(scenario, tmp_path):
    start(2, scenario, tmp_path)


def test_a_rank_that_ends_is_reported(tmp_path):
    start(2, peer_ends, tmp_path, killed={1})


def test_a_rank_alone_is_a_node():
    ring(mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own]), 1000, 0)


def test_a_rank_that_does_not_exist_is_refused_at_once(tmp_path):
    with pytest.raises(mpgpu.ArgumentError, match="rank 3 of 2"):
        mpgpu.Node(rank=3, ranks=2, socket=tmp_path / "ranks")


def test_a_file_where_ranks_would_meet_is_left_alone(tmp_path):
    file = tmp_path / "results"
    file.write_text("results")
    with pytest.raises(mpgpu.ArgumentError, match="in use by a file that is not a socket"):
        mpgpu.Node(rank=0, ranks=1, socket=file)
    assert file.read_text() == "results"


def test_a_transfer_of_a_node_that_is_none_is_refused():
    node = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: own)
    for transfer in (7, ((0, 0), (0, 0)), ((0,), (0, 0), 1), ((0, 0, -1), (0, 0), 1), ((0, 0), (0, 0), 1.5)):
        with pytest.raises(TypeError, match=r"transfer 0 is .*: it must be \(\(rank, window, offset\), \(rank, window, offset\), bytes\)"):
            node.plan([bytearray(10)], [transfer])


def mpi() -> None:
    """Runs the test below on one rank, which mpirun has started."""
    from mpi4py import MPI

    ring(mpgpu.Node(MPI.COMM_WORLD), COUNT, MPI.COMM_WORLD.Get_rank())
    print("right", flush=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_communicator_of_mpi4py_makes_a_node(ranks):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    # Options of Open MPI for many ranks on few cores, and for running as root. Other implementations of MPI ignore them.
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PYTHONPATH": str(pathlib.Path(__file__).parent),
    }
    command = ["mpirun", "-n", str(ranks), sys.executable, "-c", "import test_node; test_node.mpi()"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("right") == ranks


def test_ctrl_c_in_the_allgather_is_no_error_of_a_rank():
    def interrupted(own):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mpgpu.Node(rank=0, ranks=2, allgather=interrupted)


def test_a_node_goes_with_its_last_reference():
    gc.disable()
    try:
        node = mpgpu.Node(rank=0, ranks=1, allgather=lambda own: [own])
        messenger = mpgpu.Channel(node, 0)._messenger
        watched = weakref.ref(node), weakref.ref(messenger)
        del node, messenger
        assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()
