"""Real ranks over gloo: the bits of the simulation, for every plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from every_plan import every_plan, inputs
from wire import simulated as simulate_plan

from samestep.collectives import engine, ring
from samestep.collectives.engine import ScratchBuffers
from samestep.collectives.point_to_point import PointToPoint
from samestep.testing import assert_same_bits

CASES = [(0, torch.int64), (1, torch.float32), (7, torch.bfloat16), (1003, torch.float32), (30_001, torch.float64)]
OTHERS = [(129, torch.uint8), (129, torch.int16), (129, torch.float16), (129, torch.complex64)]


def all_plans(cases):
    """Runs every plan over the whole group on each (elements, dtype); returns what this rank ends with."""
    dist.init_process_group("gloo")
    transport, scratch, ends = PointToPoint(dist.group.WORLD), ScratchBuffers(), []
    for plan in every_plan(transport.size):
        for elements, dtype in cases:
            buffer = inputs(plan, elements, dtype)[transport.rank]
            engine.run(plan, buffer, transport, scratch)
            ends.append(buffer)
    return ends


def simulated(ranks, cases):
    by_case = [simulate_plan(plan, inputs(plan, *case)) for plan in every_plan(ranks) for case in cases]
    return [list(of_rank) for of_rank in zip(*by_case, strict=True)]


def test_four_real_ranks_end_with_the_bits_of_the_simulation(four_ranks):
    cases = [(7, torch.bfloat16), (1003, torch.float32)]
    assert_same_bits(four_ranks(all_plans, cases), simulated(4, cases))


def test_three_real_ranks_end_with_the_bits_of_the_simulation(three_ranks):
    assert_same_bits(three_ranks(all_plans, CASES + OTHERS), simulated(3, CASES + OTHERS))


def part_of_the_world():
    """Ranks 1 and 3 have a group of their own, in which they are 0 and 1."""
    dist.init_process_group("gloo")
    group = dist.new_group([1, 3])
    buffer = torch.tensor([dist.get_rank()])
    if dist.get_rank() in {1, 3}:
        engine.run(ring.all_reduce(2), buffer, PointToPoint(group))
    dist.barrier()  # rank 0 has the store
    return buffer.item()


def test_ranks_are_those_of_the_group(four_ranks):
    assert four_ranks(part_of_the_world) == [0, 4, 2, 4]


def two_at_once():
    dist.init_process_group("gloo")
    both = [PointToPoint(dist.group.WORLD), PointToPoint(dist.group.WORLD, first_tag=1000)]
    buffers = [torch.arange(6.0) * (dist.get_rank() + 1), torch.arange(6.0) + 10]
    parts = [engine.steps(ring.all_reduce(3), buffer, each) for buffer, each in zip(buffers, both, strict=True)]
    for _ in zip(*parts, strict=True):  # round by round, one beside the other
        pass
    return [buffer.tolist() for buffer in buffers]


def test_two_collectives_run_side_by_side_under_tags_of_their_own(three_ranks):
    sums = [[0.0, 6.0, 12.0, 18.0, 24.0, 30.0], [30.0, 33.0, 36.0, 39.0, 42.0, 45.0]]
    assert three_ranks(two_at_once) == [sums] * 3
