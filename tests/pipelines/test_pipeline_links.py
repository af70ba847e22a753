"""Links between the ranks of a pipeline are measured, and all ranks know the same."""

from __future__ import annotations

import math

import samestep
from samestep.pipelines.layers import Link
from samestep.pipelines.links import measure_link


def measured(pipeline):
    with samestep.world(pipeline=pipeline) as world:
        return measure_link(world)


def test_all_ranks_know_the_slowest_link(four_ranks):
    """Two replicas of two stages."""
    found = four_ranks(measured, 2)
    assert len(set(found)) == 1
    assert 0 < found[0].overhead < 5
    assert 0 <= found[0].latency < 5
    assert 0 < found[0].bandwidth < math.inf


def test_one_stage_sends_nothing():
    assert measured(1) == Link()
