import pytest
import torch

import samestep
from samestep.errors import PeerError
from samestep.runtime import exchange
from samestep.testing import assert_same_bits


def talk():
    with samestep.world() as world:
        everyone = world.everyone
        return (
            exchange.all_gather_json(everyone, {"rank": world.rank, "text": "é" * world.rank}),
            exchange.broadcast_json(everyone, ["from", world.rank], source=world.size - 1),
        )


def test_json_reaches_every_rank_in_rank_order(three_ranks):
    gathered = [{"rank": rank, "text": "é" * rank} for rank in range(3)]
    assert three_ranks(talk) == [(gathered, ["from", 2])] * 3


def test_alone_one_hears_oneself():
    assert talk() == ([{"rank": 0, "text": ""}], ["from", 0])


def gather(dtype):
    with samestep.world() as world:
        mine = torch.arange(3 * world.rank).reshape(world.rank, 3).to(dtype)
        return exchange.all_gather_tensors(world.data, mine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_uneven_and_no_length_are_gathered_bit_for_bit(three_ranks, dtype):
    expected = [torch.arange(3 * rank).reshape(rank, 3).to(dtype) for rank in range(3)]
    for gathered in three_ranks(gather, dtype):
        assert_same_bits(gathered, expected)


def gather_scalars():
    with samestep.world() as world:
        return exchange.all_gather_tensors(world.data, torch.tensor(float(world.rank)))


def test_scalars_stay_scalars(two_ranks):
    assert_same_bits(two_ranks(gather_scalars)[1], [torch.tensor(0.0), torch.tensor(1.0)])


def one_fails():
    with samestep.world() as world:
        try:
            exchange.raise_on_all_ranks(world.everyone, ValueError("disk full") if world.rank == 1 else None)
        except (ValueError, PeerError) as error:
            return f"{type(error).__name__}: {error}"


def test_a_problem_of_one_rank_is_raised_on_all(three_ranks):
    other = "PeerError: rank 1 failed: ValueError: disk full"
    assert three_ranks(one_fails) == [other, "ValueError: disk full", other]
