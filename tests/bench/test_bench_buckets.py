"""The bucket benchmark times a decided model beside one with the default."""

from __future__ import annotations

import pytest
from small import small

from samestep.bench import buckets
from samestep.bench.harness import Options
from samestep.bench.workloads import MLP
from samestep.errors import UsageError
from samestep.replicas import bucket_tuner


def compared(*args):
    """With fewer steps until a decision."""
    before = bucket_tuner.BLOCK, bucket_tuner.PROFILED
    bucket_tuner.BLOCK = bucket_tuner.PROFILED = 1
    try:
        return buckets.compare(*args)
    finally:
        bucket_tuner.BLOCK, bucket_tuner.PROFILED = before


@pytest.mark.parametrize("reduce", buckets.WAYS)
def test_every_rank_returns_a_time_of_both_for_each_pair_and_the_same_choice(two_ranks, reduce):
    given = MLP, reduce, "cpu", 2, reduce is None
    (times, chosen, setting), (_, other, _) = two_ranks(small, compared, given)
    assert [len(side) for side in times] == [2, 2]
    assert min(map(min, times)) > 0
    assert chosen == other
    taken, number, hidden = chosen
    assert taken in (True, False)
    assert number >= 1
    assert 0 <= hidden <= 1
    assert (setting["ranks"], setting["batch_size"]) == (2, 2 * MLP.batch)


def test_one_rank_has_no_buckets_to_compare():
    with pytest.raises(UsageError, match="buckets need 2 ranks or more: samestep bench buckets -n 2"):
        buckets.run(Options(ranks=1))
