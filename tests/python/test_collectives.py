# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests collectives in one process; test_node.py tests those between ranks."""

from __future__ import annotations

import mpgpu
import numpy
import pytest


def arrays(context, counts):
    """Returns one array for each count, in memory of GPU 0, 1, … The host backend makes this memory readable."""
    made = [context.empty(count, device=gpu, dtype="i4") for gpu, count in enumerate(counts)]
    for one in made:
        one.numpy()[:] = -1
    return made


@pytest.fixture
def context():
    return mpgpu.Context("host", topology="beluga")


def test_broadcast_scatter_and_gather_bring_each_its_part(context):
    source = numpy.arange(600_000, dtype="i4")
    copies = arrays(context, [600_000] * 4)
    mpgpu.broadcast(source, copies, context=context)
    assert all(numpy.array_equal(one.numpy(), source) for one in copies)
    parts = arrays(context, [100_000, 0, 499_990, 10])
    mpgpu.scatter(source, parts, context=context)
    assert numpy.array_equal(numpy.concatenate([one.numpy() for one in parts]), source)
    back = numpy.zeros_like(source)
    mpgpu.gather(parts, back, context=context)
    assert numpy.array_equal(back, source)
    mpgpu.broadcast(source, [], context=context)


def test_what_all_gather_has_in_place_is_not_copied_and_the_second_time_is_a_look_up(context):
    parts, wholes = arrays(context, [5, 7, 11]), arrays(context, [23] * 3)
    for index, part in enumerate(parts):
        part.numpy()[:] = index
    for _ in range(2):
        mpgpu.all_gather(parts, wholes, context=context)
        assert all(numpy.array_equal(one.numpy(), [0] * 5 + [1] * 7 + [2] * 11) for one in wholes)
        wholes[1].numpy()[:] = 9
    assert context.statistics().plan_cache_hits >= 1
    host = numpy.zeros((2, 8), dtype="u1")
    host[0, :4], host[1, 4:] = 1, 2
    mpgpu.all_gather([host[0, :4], host[1, 4:]], [host[0], host[1]], context=context)
    assert numpy.array_equal(host, [[1] * 4 + [2] * 4] * 2)


def test_all_to_all_with_equal_and_with_other_sizes(context):
    sources, destinations = arrays(context, [6, 6, 6]), arrays(context, [6, 6, 6])
    for index, source in enumerate(sources):
        source.numpy()[:] = numpy.arange(6) + 10 * index
    mpgpu.all_to_all(sources, destinations, context=context)
    assert numpy.array_equal(destinations[1].numpy(), [2, 3, 12, 13, 22, 23])
    sizes = [[4, 20, 0], [0, 0, 24], [20, 4, 0]]
    mpgpu.all_to_all(sources, destinations, sizes=sizes, context=context)
    assert numpy.array_equal(destinations[0].numpy(), [0, 20, 21, 22, 23, 24])


def test_what_does_not_fit_is_named(context):
    sources, destinations = arrays(context, [6, 6]), arrays(context, [12, 11])
    with pytest.raises(mpgpu.ArgumentError, match="destination 1 has 44 bytes, but 48 are transferred there"):
        mpgpu.all_gather(sources, destinations, context=context)
    with pytest.raises(mpgpu.ArgumentError, match="1 destinations for 2 sources"):
        mpgpu.all_to_all(sources, destinations[:1], context=context)
    with pytest.raises(mpgpu.ArgumentError, match="2 lists of 2 sizes"):
        mpgpu.all_to_all(sources, sources, sizes=[[24, 0]], context=context)
    with pytest.raises(mpgpu.ArgumentError, match="overlap"):
        mpgpu.all_to_all(sources, sources, context=context)
    with pytest.raises(TypeError, match="destination 0 is a int"):
        mpgpu.broadcast(sources[0], [3], context=context)
