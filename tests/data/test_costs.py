import itertools
import random
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import samestep
from samestep.data.audit import audit
from samestep.data.costs import (
    TOLERANCE,
    BucketedOrder,
    Buckets,
    CostBalancedOrder,
    Costs,
    by_cost,
    cut_by_cost,
    cut_step,
    padded_cost,
)
from samestep.data.order import SampleOrder, StepPartitioner
from samestep.errors import DataError, PeerError, StepError

LENGTHS = np.random.default_rng(0).lognormal(3, 1, 500).astype(int) + 1


def dearest_of_the_best(costs, parts, most):
    """The oracle: every way to cut, tried."""
    edges = itertools.combinations_with_replacement(range(len(costs) + 1), parts - 1)
    cuts = [list(itertools.pairwise([0, *inner, len(costs)])) for inner in edges]
    return min(
        max(padded_cost(costs, span) for span in cut)
        for cut in cuts
        if most is None or all(stop - start <= most for start, stop in cut)
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_no_cut_has_a_much_cheaper_dearest_part(costs, parts, room, capped):
    costs = np.sort(np.array(costs, dtype=np.float64))
    most = -(-len(costs) // parts) + room if capped else None
    spans = cut_by_cost(costs, parts, most)
    assert [position for span in spans for position in range(*span)] == list(range(len(costs)))
    assert sum(stop == start for start, stop in spans) == max(0, parts - len(costs))
    assert most is None or max(stop - start for start, stop in spans) <= most
    dearest = max(padded_cost(costs, span) for span in spans)
    # the search ends within 1/1024; one sample less is what that may come to where costs are whole numbers
    assert dearest <= dearest_of_the_best(costs, parts, most) * (1 + 2 / TOLERANCE) + 1e-9


#                   sorted          1 2 2 3 4 7 8 9
# one micro-batch   rank 0, 1       └─ 20 ──┘ └ 27┘
# two               0 │ 1           └4┘ └6┘   └14┘└18┘     rank 1 has had the dearer last part, so the cheaper first
def test_the_cut_looks_like_the_picture():
    costs = np.array([1.0, 2, 2, 3, 4, 7, 8, 9])
    assert cut_by_cost(costs, 2) == [(0, 5), (5, 8)]
    assert cut_step(costs, 2, 2, 2) == [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]


def micro_batches(ranks, micro, n=500, batch=40, start=80, order=None):
    order = order or SampleOrder(n, seed=2)
    costs = Costs(LENGTHS, n)
    size = -(-batch // (ranks * micro))
    dealt = [
        CostBalancedOrder(order, StepPartitioner(n, batch, size, rank, ranks), costs, origin=0) for rank in range(ranks)
    ]
    steps = [part.step(start) for part in dealt]
    return [[dealt[0].take(*step.micro[place]).tolist() for step in steps] for place in range(len(steps[0].micro))]


def test_a_step_holds_the_same_samples_on_any_number_of_ranks_and_so_does_each_micro_batch():
    sets = [[sorted(itertools.chain(*parts)) for parts in micro_batches(ranks, 5)] for ranks in (1, 2, 4, 8)]
    assert sets[0] == sets[1] == sets[2] == sets[3]
    assert sorted(itertools.chain(*sets[0])) == sorted(SampleOrder(500, seed=2).take(80, 120).tolist())


def test_micro_batches_go_from_the_cheapest_to_the_dearest():
    dearest = [max(LENGTHS[index] for part in parts for index in part) for parts in micro_batches(2, 5)]
    assert dearest == sorted(dearest)


@settings(deadline=None)
@given(
    total=st.integers(1, 120),
    batch=st.integers(1, 60),
    micro=st.one_of(st.none(), st.integers(1, 20)),
    ranks=st.integers(1, 6),
    cursor=st.integers(0, 120),
)
def test_all_ranks_together_take_every_sample_of_every_step_once(total, batch, micro, ranks, cursor):
    order, costs = SampleOrder(total, seed=1), Costs(LENGTHS[:total], total)
    for start in range(cursor, total, batch):
        cuts = [StepPartitioner(total, batch, micro, rank, ranks) for rank in range(ranks)]
        dealt = [CostBalancedOrder(order, cut, costs, cursor) for cut in cuts]
        steps = [part.step(start) for part in dealt]
        assert len({len(step.micro) for step in steps}) == 1
        assert all(micro is None or stop - first <= micro for step in steps for first, stop in step.micro)
        taken = [
            index for step, part in zip(steps, dealt, strict=True) for span in step.micro for index in part.take(*span)
        ]
        assert sorted(taken) == sorted(order.take(start, steps[0].stop).tolist())


def test_the_slowest_rank_waits_for_less():
    costs, order = Costs(LENGTHS, 500), SampleOrder(500, seed=1)
    worst = {"as it lies": 0.0, "by cost": 0.0}
    for start in range(0, 480, 40):
        ranks = [order.take(*StepPartitioner(500, 40, None, rank, 4).step(start).micro[0]) for rank in range(4)]
        worst["as it lies"] += max(len(part) * LENGTHS[part].max() for part in ranks)
        arranged = costs.of(by_cost(order.take(start, start + 40), costs))
        worst["by cost"] += max(padded_cost(arranged, part[0]) for part in cut_step(arranged, 1, 4))
    assert worst["by cost"] < worst["as it lies"] / 2


# --- buckets ---------------------------------------------------------------------------------


def bucketed(n, steps, batch, *, epoch=0, shuffle=True, end=None):
    return BucketedOrder(
        SampleOrder(n, 3, epoch, shuffle), Buckets(Costs(LENGTHS[:n], n), steps, batch, n if end is None else end)
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 7), st.integers(1, 30), st.booleans())
def test_a_window_holds_what_it_held(n, steps, batch, shuffle):
    order, window = bucketed(n, steps, batch, shuffle=shuffle), steps * batch
    for start in range(0, n, window):
        stop = min(start + window, n)
        assert sorted(order.take(start, stop)) == sorted(SampleOrder(n, 3, 0, shuffle).take(start, stop))
    whole = order.take(0, n).tolist()
    low, high = n // 3, n - n // 4
    assert bucketed(n, steps, batch, shuffle=shuffle).take(low, high).tolist() == whole[low:high]


def test_steps_hold_samples_that_cost_alike_and_come_in_no_order_of_cost():
    order = bucketed(400, 10, 20)
    steps = [LENGTHS[order.take(start, start + 20)] for start in range(0, 400, 20)]
    assert np.mean([step.max() / step.min() for step in steps]) < 3
    assert [step.max() for step in steps[:10]] != sorted(step.max() for step in steps[:10])
    other = bucketed(400, 10, 20, epoch=1)
    assert [LENGTHS[other.take(start, start + 20)].max() for start in range(0, 200, 20)] != [
        step.max() for step in steps[:10]
    ]


def test_without_a_shuffle_a_window_goes_from_the_cheapest_to_the_dearest():
    taken = LENGTHS[bucketed(100, 4, 20, shuffle=False).take(0, 80)].tolist()
    assert taken == sorted(taken)


def test_what_drop_last_leaves_out_is_what_it_left_out_before():
    assert bucketed(95, 3, 10, end=90).take(90, 95).tolist() == SampleOrder(95, 3).take(90, 95).tolist()
    assert sorted(bucketed(95, 3, 10, end=90).take(0, 90)) == sorted(SampleOrder(95, 3).take(0, 90))


def test_a_billion_samples_take_the_memory_of_two_windows():
    tracemalloc.start()
    try:
        costs = Costs(lambda index: index % 1000, 10**9)
        order = BucketedOrder(SampleOrder(10**9, seed=1), Buckets(costs, 10, 256, 10**9))
        dealt = CostBalancedOrder(order, StepPartitioner(10**9, 256, None, 0, 4), costs, 0)
        for start in (0, 256 * 10**6, 0):
            dealt.take(*dealt.step(start).micro[0])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# --- through shards --------------------------------------------------------------------------


def seen(options, n=100, batch=12, epochs=2):
    with samestep.world() as world:
        data = TensorDataset(torch.arange(n))
        batches = samestep.shards(data, world, batch_size=batch, cost=LENGTHS[:n], seed=3, **options)
        found, step = [[]], 0
        for _ in range(epochs):
            for (x,) in batches:
                found[-1] += x.tolist()
                if batches.step_ends:
                    batches.commit()
                    step += 1
                    found.append([])
        return found[:-1], batches.state_dict()


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"workers": 1}, {"bucket": 3}, {"weight": len}])
def test_ranks_together_take_the_steps_of_one_process(two_ranks, options):
    (first, state), (second, other) = two_ranks(seen, options)
    alone, whole = seen(options)
    assert state == other == whole
    assert [sorted(mine + theirs) for mine, theirs in zip(first, second, strict=True)] == [sorted(s) for s in alone]
    assert audit(state).summary.startswith("every sample of 2 epochs exactly once")


def test_without_buckets_the_ledger_is_the_one_without_costs():
    with samestep.world() as world:
        batches = samestep.shards(TensorDataset(torch.arange(100)), world, batch_size=12, seed=3)
        for _ in range(2):
            for _ in batches:
                batches.commit()
        assert batches.state_dict() == seen({})[1]


class Bad(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in {7, 30}:
            raise ValueError("no picture")
        return torch.tensor(index)


@pytest.mark.parametrize("bucket", [None, 2])
def test_a_skipped_sample_is_recorded_where_it_stands_in_the_order(bucket):
    with samestep.world() as world:
        batches = samestep.shards(
            Bad(), world, batch_size=8, cost=LENGTHS[:40], bucket=bucket, on_bad_sample="skip", seed=3
        )
        assert sum(len(x) for x in batches) == 38
        assert "exactly once except 2 skipped: index " in audit(batches.state_dict()).summary


def interrupted(bucket, stop, then):
    """All samples of an epoch that is left after `stop` steps and resumed as `then` says."""
    with samestep.world() as world:
        data, taken = TensorDataset(torch.arange(100)), []
        batches = samestep.shards(data, world, batch_size=10, cost=LENGTHS[:100], bucket=bucket)
        for (x,) in itertools.islice(batches, stop):
            taken += x.tolist()
            batches.commit()
        resumed = samestep.shards(data, world, **{"batch_size": 10, "cost": LENGTHS[:100], "bucket": bucket, **then})
        resumed.load_state_dict(batches.state_dict())
        return taken + [sample for (x,) in resumed for sample in x.tolist()], audit(resumed.state_dict())


@pytest.mark.parametrize(
    ("bucket", "stop", "then"),
    [
        (3, 4, {}),
        (3, 3, {"bucket": None}),
        (3, 6, {"bucket": 2}),
        (None, 4, {"bucket": 2}),
        (None, 4, {"cost": LENGTHS[100:200]}),
        (3, 6, {"batch_size": 5, "bucket": 4}),
        (3, 6, {"batch_size": 7, "bucket": None}),
    ],
)
def test_a_resume_takes_every_other_sample_once(bucket, stop, then):
    taken, found = interrupted(bucket, stop, then)
    assert sorted(taken) == list(range(100))
    assert found.summary.startswith("every sample of 1 epoch exactly once")


@pytest.mark.parametrize("then", [{"bucket": None}, {"bucket": 4}, {"cost": LENGTHS[100:200]}, {"batch_size": 5}])
def test_a_window_under_way_cannot_be_cut_otherwise(then):
    with pytest.raises(DataError, match="within a window of"):
        interrupted(3, 4, then)


def test_an_audit_with_the_costs_computes_every_step_again():
    _, state = seen({"bucket": 3})
    assert audit(state).summary == (
        "every sample of 2 epochs exactly once; which samples shared a step follows from their costs, not given here"
    )
    assert audit(state, cost=LENGTHS[:100]).summary == "every sample of 2 epochs exactly once"
    assert "other costs than those of the run" in audit(state, cost=LENGTHS[100:200]).summary


def test_an_audit_without_the_costs_finds_a_sample_that_was_used_for_another():
    _, state = seen({"bucket": 3})
    row = state["ledger"]["segments"][0]
    forged = (*row[:7], f"{int(row[7], 16) + 1:x}")
    state["ledger"]["segments"] = (forged, *state["ledger"]["segments"][1:])
    assert "epoch 0: the samples of positions [0, 100) were not those of the order" in audit(state).summary


def test_an_audit_of_a_window_under_way_says_so():
    with samestep.world() as world:
        batches = samestep.shards(TensorDataset(torch.arange(100)), world, batch_size=10, cost=LENGTHS[:100], bucket=3)
        for _ in itertools.islice(batches, 5):
            batches.commit()
        assert audit(batches.state_dict()).summary == (
            "epoch 0: 50 of 100 so far, each exactly once; which samples shared a step follows from their costs, not "
            "given here; of the window under way only the positions are known"
        )


def other_costs():
    with samestep.world() as world:
        draw = random.Random(world.rank)
        data = TensorDataset(torch.arange(100))
        try:
            return len(list(samestep.shards(data, world, batch_size=20, cost=[draw.random() for _ in range(100)])))
        except (StepError, PeerError) as error:
            return str(error)


def test_ranks_that_were_given_different_costs_are_told_so(two_ranks):
    assert any("use different settings for shards 1" in str(said) for said in two_ranks(other_costs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": [1, 2]}, "cost has shape \\[2\\] for 4 samples"),
        ({"cost": [1, -2, 3, 4]}, "sample 1 costs -2.0"),
        ({"cost": lambda index: float("nan")}, "sample 0 costs nan"),
        ({"cost": ["a", "b", "c", "d"]}, "the costs are not numbers"),
        ({"bucket": 2}, "bucket=2 needs cost="),
        ({"cost": [1, 2, 3, 4], "bucket": 0}, "bucket=0 must be at least 1"),
    ],
)
def test_costs_that_make_no_sense_are_refused_in_one_line(options, message):
    with samestep.world() as world, pytest.raises(DataError, match=message) as caught:
        samestep.shards(TensorDataset(torch.arange(4)), world, batch_size=2, **options)
    assert "\n" not in str(caught.value)
