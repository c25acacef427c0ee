#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Three-dimensional Jacobi relaxation by several processes with one GPU each, which exchange faces through channels.

python jacobi3d.py [X Y Z] [--ranks 1,2,4] [--blocks 2] [--weak]     # starts the processes
mpirun -n 4 python jacobi3d.py [X Y Z] [...]                         # with mpi4py

This is examples/jacobi3d in Python. Blocks are coroutines: each packs its faces, exchanges them with up to six neighbours of this process
and of others, unpacks and sweeps. Faces are staged through host memory, or sent directly from device memory. torch or CuPy on GPUs, NumPy
on virtual devices. Every cell is compared bitwise with the result of NumPy for the undivided domain, and both forms with each other.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time

import mpgpu
import numpy

CHECKED, ROUNDS, ITERATIONS = 5, 7, 20
INNER = (slice(1, -1),) * 3  # an array without its ghost cells
NEIGHBOURS = tuple((axis, side) for axis in range(3) for side in (-1, 1))


def layer(axis, index):
    """Returns the slices that select one layer of an array with ghost cells, without the edges of the layer."""
    return tuple(index if each == axis else slice(1, -1) for each in range(3))


def sweep(old, new):
    """Computes one iteration. Adds the operands in the same order as the CPU and the C++ example, so that results are bitwise equal."""
    z, y, x = ((old[layer(axis, slice(0, -2))], old[layer(axis, slice(2, None))]) for axis in range(3))
    new[INNER] = (((x[0] + x[1]) + (y[0] + y[1])) + (z[0] + z[1])) * (1 / 6)


class Arrays:
    """Creates and copies arrays: on a GPU with torch or CuPy, or on a virtual device with NumPy."""

    def __init__(self, context, rank):
        self.context, self.device, self.xp = context, rank % context.gpus, numpy
        if context.backend == "cuda":
            try:
                import torch as xp
            except ImportError:
                import cupy as xp
            self.xp = xp

    def empty(self, shape):
        if self.xp is numpy:
            return self.context.empty(shape, "float64", self.device, shared=True).numpy()
        if self.xp.__name__ == "torch":
            return self.xp.empty(tuple(shape), dtype=self.xp.float64, device=f"cuda:{self.device}")
        with self.xp.cuda.Device(self.device):
            return self.xp.empty(shape)

    def pinned(self, shape):
        return self.context.empty(shape, "float64", shared=True).numpy()

    def upload(self, array, values):
        mpgpu.copy(array, numpy.ascontiguousarray(values))

    def download(self, array):
        values = numpy.empty(tuple(array.shape))
        mpgpu.copy(values, array)
        return values

    def synchronize(self):
        if self.xp.__name__ == "torch":
            self.xp.cuda.synchronize()
        elif self.xp is not numpy:
            self.xp.cuda.Device(self.device).synchronize()


def divide(domain, count):
    """Returns the numbers of blocks in each dimension for which the total surface of the blocks is smallest."""
    ways = [way for way in itertools.product(range(1, count + 1), repeat=3) if way[0] * way[1] * way[2] == count]
    ways = [way for way in ways if all(blocks <= cells for blocks, cells in zip(way, domain))]
    if not ways:
        raise SystemExit(
            f"jacobi3d: a domain of {domain} cells cannot be divided into {count} equal blocks: enlarge it, or use fewer ranks or blocks"
        )

    def surface(way):
        z, y, x = (cells / blocks for blocks, cells in zip(way, domain))
        return z * y + y * x + x * z

    return min(ways, key=surface)


class Block:
    """Cuboid part of the domain: two arrays with ghost cells, and for each face a channel to send and one to receive."""

    def __init__(self, arrays, field, place, blocks):
        self.place, self.arrays = place, arrays
        cells = tuple(extent - 2 for extent in field.shape)
        bounds = [(at * n // count, (at + 1) * n // count) for at, n, count in zip(place, cells, blocks)]
        self.where = tuple(slice(first, last) for first, last in bounds)
        extents = [last - first + 2 for first, last in bounds]
        self.old, self.new = arrays.empty(extents), arrays.empty(extents)
        start = field[tuple(slice(first, last + 2) for first, last in bounds)].copy()
        self.sends, self.receives, self.staged = {}, {}, None
        for axis, side in NEIGHBOURS:
            if 0 <= place[axis] + side < blocks[axis]:
                start[layer(axis, 0 if side < 0 else -1)] = numpy.nan  # overwritten by received cells
                shape = [extent - 2 for each, extent in enumerate(extents) if each != axis]
                self.sends[axis, side], self.receives[axis, side] = arrays.empty(shape), arrays.empty(shape)
        for array in (self.old, self.new):
            arrays.upload(array, start)

    def connect(self, channels):
        """Stores the two channels of each face: one to send and one to receive."""
        self.out = {face: channels[self.place, face] for face in self.sends}
        beyond = {(axis, side): tuple(at + side * (each == axis) for each, at in enumerate(self.place)) for axis, side in self.sends}
        self.into = {(axis, side): channels[beyond[axis, side], (axis, -side)] for axis, side in self.receives}

    def stage(self):
        """Allocates host memory for the faces, and plans the copies to and from it."""
        memory = [{face: self.arrays.pinned(array.shape) for face, array in kind.items()} for kind in (self.sends, self.receives)]
        down = mpgpu.Plan([(memory[0][face], array) for face, array in self.sends.items()], max_paths=1)
        up = mpgpu.Plan([(array, memory[1][face]) for face, array in self.receives.items()], max_paths=1)
        self.staged = memory, down, up

    async def iterate(self, iterations, sweeps):
        (sends, receives), down, up = self.staged or ((self.sends, self.receives), None, None)
        for _ in range(iterations):
            for (axis, side), face in self.sends.items():
                face[...] = self.old[layer(axis, 1 if side < 0 else -2)]
            if down:
                down.execute().synchronize()
            arriving = [self.into[face].receive(array) for face, array in receives.items()]
            leaving = [self.out[face].send(array) for face, array in sends.items()]
            for message in (*arriving, *leaving):
                await message
            if up:
                up.execute().synchronize()
            for (axis, side), face in self.receives.items():
                self.old[layer(axis, 0 if side < 0 else -1)] = face
            if sweeps:
                sweep(self.old, self.new)
                self.old, self.new = self.new, self.old


class Team:
    """Communication of the ranks that compute one domain, other than the exchange of faces."""

    def __init__(self, node):
        self.rank, self.ranks, self.messenger = node.rank, node.ranks, mpgpu.Messenger(node)
        everyone = range(1, self.ranks) if self.rank == 0 else [0]
        self.channels = [mpgpu.Channel(self.messenger, rank) for rank in everyone]

    def largest(self, own):
        """Returns the maximum of `own` over all ranks. Must be called by all ranks, and acts as a barrier."""
        value = numpy.array([own], dtype="float64")
        if self.rank:
            self.channels[0].send(value).synchronize()
            self.channels[0].receive(value).synchronize()
            return value[0]
        for channel in self.channels:
            channel.receive(value).synchronize()
            own = max(own, value[0])
        value[0] = own
        for channel in self.channels:
            channel.send(value).synchronize()
        return own


class Solver:
    """State of the computation with one form of exchange, with its own blocks."""

    def __init__(self, name, arrays, team, field, blocks, blocks_each):
        self.name, self.team, self.arrays, self.readings = name, team, arrays, ([], [])
        self.loop = asyncio.new_event_loop()
        places = list(itertools.product(*(range(count) for count in blocks)))
        owner = {place: number // blocks_each for number, place in enumerate(places)}
        self.blocks = [Block(arrays, field, place, blocks) for place in places if owner[place] == team.rank]
        # All ranks iterate over the faces in the same order, because the n-th channel that one rank creates to another is connected with
        # the n-th channel that the other rank creates.
        channels = {}
        for place, (axis, side) in itertools.product(places, NEIGHBOURS):
            beyond = tuple(at + side * (each == axis) for each, at in enumerate(place))
            ends = [owner[place], owner.get(beyond, -1)]
            if ends[1] >= 0 and team.rank in ends:
                channels[place, (axis, side)] = mpgpu.Channel(team.messenger, ends[0] if ends[1] == team.rank else ends[1])
        for block in self.blocks:
            block.connect(channels)
            if name == "staged":
                block.stage()

    def iterate(self, iterations, sweeps):
        async def all_blocks():
            await asyncio.gather(*(block.iterate(iterations, sweeps) for block in self.blocks))

        self.loop.run_until_complete(all_blocks())
        self.arrays.synchronize()

    def timed(self, iterations, sweeps):
        self.team.largest(0)
        start = time.perf_counter()
        self.iterate(iterations, sweeps)
        return self.team.largest(time.perf_counter() - start) / iterations * 1e6

    def cells(self):
        return [(block.where, self.arrays.download(block.old)[INNER]) for block in self.blocks]


def relax(node, options):
    """Runs the example on one rank. Returns True if every cell is correct."""
    arrays, team = Arrays(node.context, node.rank), Team(node)
    domain = list(options.domain)
    factors, rest = [], node.ranks if options.weak else 1
    while rest > 1:
        factors.append(next(factor for factor in range(2, rest + 1) if rest % factor == 0))
        rest //= factors[-1]
    for number, factor in enumerate(factors):
        domain[2 - number % 3] *= factor  # starts with x, which is the last index
    field = numpy.random.default_rng(1).random([extent + 2 for extent in domain])
    blocks = divide(domain, node.ranks * options.blocks)
    solvers = [Solver(name, arrays, team, field, blocks, options.blocks) for name in ("staged", "direct")]

    other = field.copy()
    for _ in range(CHECKED):
        sweep(field, other)
        field, other = other, field
    for solver in solvers:
        solver.iterate(CHECKED, True)
    right = all((field[INNER][where] == cells).all() for solver in solvers for where, cells in solver.cells())
    for round_number in range(options.rounds + 1):
        for solver in solvers:
            for readings, sweeps in zip(solver.readings, (True, False)):
                reading = solver.timed(options.iterations, sweeps)
                if round_number:  # the first round is a warm-up
                    readings.append(reading)
    staged, direct = (solver.cells() for solver in solvers)
    right = right and all((one[1] == two[1]).all() for one, two in zip(staged, direct))
    right = team.largest(0 if right else 1) == 0
    for solver in solvers if node.rank == 0 and right else ():
        line = f"{node.ranks:5} {node.ranks * options.blocks:6}  {'_'.join(map(str, reversed(domain))):16} {solver.name:6}"
        for readings, base in zip(solver.readings, solvers[0].readings):
            median = statistics.median(readings)
            low, _, high = statistics.quantiles(readings, n=4) if len(readings) > 1 else readings * 3
            line += f" {median:10.1f} ({low:8.1f},{high:9.1f}) {statistics.median(base) / median:6.2f}"
        print(line, flush=True)
    team.largest(0)  # no rank may exit while others receive
    return right


def header():
    print("Microseconds, medians of rounds (quartiles); x: speed-up over staged. Exchange: an iteration without its sweep.")
    print(f"{'ranks':>5} {'blocks':>6}  {'domain':16} {'form':6} {'iteration':>31} {'x':>6} {'exchange':>31} {'x':>6}", flush=True)


def rank_process(rank, ranks, gpus, folder, options):
    """Runs one rank in a process that this program has started, with one visible GPU."""
    if gpus:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[rank % gpus] if names[0] else str(rank % gpus)
    device = rank % mpgpu.default_context().gpus
    node = mpgpu.Node(rank=rank, ranks=ranks, socket=os.path.join(folder, "ranks"), devices=[device])
    sys.exit(0 if relax(node, options) else 1)


def count_gpus(answer):
    context = mpgpu.default_context()
    answer.send(context.gpus if context.backend == "cuda" else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("domain", nargs="*", type=int, default=[96, 96, 96], help="cells in x, y and z; with --weak, of one rank")
    parser.add_argument("--weak", action="store_true", help="the domain grows with the number of ranks, x first")
    parser.add_argument("--ranks", default="2", help="numbers of processes; runs one problem for each: 1,2,4")
    parser.add_argument("--blocks", type=int, default=1, help="blocks of each process")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="iterations of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if len(options.domain) != 3:
        parser.error("the domain is three numbers: X Y Z")
    options.domain.reverse()  # z is the first index of arrays
    if any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_rank() == 0:
            header()
        return 0 if relax(mpgpu.Node(MPI.COMM_WORLD), options) else 1
    spawn = multiprocessing.get_context("spawn")
    # Count the GPUs in a process that exits, so that this process does not use a GPU.
    answer, question = spawn.Pipe(duplex=False)
    counter = spawn.Process(target=count_gpus, args=(question,))
    counter.start()
    question.close()
    gpus = answer.recv()
    counter.join()
    if gpus and not any(importlib.util.find_spec(name) for name in ("torch", "cupy")):
        print("skipped: on GPUs this example needs torch or CuPy; MPGPU_BACKEND=host runs it on virtual devices")
        return 0
    header()
    for ranks in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            processes = [spawn.Process(target=rank_process, args=(rank, ranks, gpus, folder, options)) for rank in range(ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                print("jacobi3d: WRONG, or a rank has failed", file=sys.stderr)
                return 1
    print("jacobi3d: every cell of both forms is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
