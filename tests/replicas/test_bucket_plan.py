"""Buckets are chosen as trying all of them would, and cut as DistributedDataParallel cuts."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.network.links import Link
from samestep.replicas.bucket_plan import (
    DEFAULT_CAPS,
    MIB,
    SLACK,
    BackwardProfile,
    BucketPlan,
    Partition,
    best_single_size,
    coalesced,
    ddp_layout,
    is_faster,
    optimal_layout,
)

MOST = 9  # gradients: 256 cuts


def all_cuts(n):
    for number in range(n):
        for inner in itertools.combinations(range(1, n), number):
            yield (*inner, n)


@st.composite
def backwards(draw, most=MOST):
    n = draw(st.integers(1, most))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n))
    ready = draw(st.lists(st.floats(0.0, 10.0), min_size=n, max_size=n))
    link = Link(draw(st.floats(0.0, 2.0)), draw(st.floats(10.0, 1e4)))
    return BackwardProfile(tuple(sizes), tuple(ready), link, draw(st.booleans()))


@given(backwards())
def test_no_cut_ends_earlier(backward):
    best = backward.finish_s(optimal_layout(backward, slack=0))
    assert best == min(backward.finish_s(cut) for cut in all_cuts(len(backward.sizes)))


@given(backwards())
def test_of_the_cuts_that_end_early_enough_it_has_the_fewest_buckets(backward):
    cuts = list(all_cuts(len(backward.sizes)))
    most = min(map(backward.finish_s, cuts)) * (1 + SLACK)
    chosen = optimal_layout(backward)
    assert backward.finish_s(chosen) <= most
    assert len(chosen) == min(len(cut) for cut in cuts if backward.finish_s(cut) <= most)


@settings(max_examples=20)
@given(backwards(most=12))
def test_trying_all_of_twelve_gradients_finds_nothing_better(backward):
    assert backward.finish_s(optimal_layout(backward, slack=0)) == min(
        map(backward.finish_s, all_cuts(len(backward.sizes)))
    )


@given(backwards(), st.floats(1.0, 3.0), st.data())
def test_what_comes_later_or_costs_more_never_ends_earlier(backward, factor, data):
    late = data.draw(st.integers(0, len(backward.sizes) - 1))
    ready = tuple(time * factor if at == late else time for at, time in enumerate(backward.ready_s))
    link = Link(backward.link.latency_s * factor, backward.link.bytes_per_s / factor)
    for cut in all_cuts(len(backward.sizes)):
        before = backward.finish_s(cut)
        assert BackwardProfile(backward.sizes, ready, backward.link, backward.beside).finish_s(cut) >= before
        assert BackwardProfile(backward.sizes, backward.ready_s, link, backward.beside).finish_s(cut) >= before


@given(backwards())
def test_in_the_thread_of_the_backward_all_all_reduces_count_and_one_bucket_is_best(backward):
    inside = BackwardProfile(backward.sizes, backward.ready_s, backward.link, beside=False)
    for cut in all_cuts(len(inside.sizes)):
        assert inside.finish_s(cut) == pytest.approx(inside.alone_s + inside.adding_s(cut))
        assert Partition.predicted(inside, cut).hidden == pytest.approx(0, abs=1e-6)
    assert optimal_layout(inside) == (len(inside.sizes),)


@given(backwards())
def test_no_bucket_is_added_before_the_one_before_it(backward):
    for cut in all_cuts(len(backward.sizes)):
        done = 0.0
        for begin, end in zip((0, *cut), cut, strict=False):
            ready = max(backward.ready_s[:end]) if backward.beside else max(backward.ready_s)
            done = max(done, ready) + backward.link.seconds(sum(backward.sizes[begin:end]))
        assert backward.finish_s(cut) == done


@given(backwards())
def test_the_bytes_of_a_cuts_buckets_are_the_caps_that_make_it(backward):
    for cut in all_cuts(len(backward.sizes)):
        caps = backward.buckets(cut)
        assert ddp_layout(backward.sizes, caps) == cut
        assert ddp_layout(backward.sizes, caps[::-1], from_the_end=True) == cut


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_it_cuts_as_torch_does(elements, caps):
    tensors = [torch.empty(n) for n in elements]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps)
    assert ddp_layout([tensor.nbytes for tensor in tensors], caps) == tuple(bucket[-1] + 1 for bucket in theirs)


@given(backwards(), st.integers(1, MOST))
def test_gradients_taken_together_keep_their_bytes_and_wait_for_the_last(backward, most):
    small = coalesced(backward, most)
    assert len(small.sizes) <= most
    assert sum(small.sizes) == sum(backward.sizes)
    assert small.alone_s == backward.alone_s
    cut = optimal_layout(small, slack=0)
    ends = itertools.accumulate(small.buckets(cut))
    starts = list(itertools.accumulate(backward.sizes))
    assert small.finish_s(cut) == backward.finish_s(tuple(starts.index(end) + 1 for end in ends))


@given(backwards())
def test_one_cap_for_all_is_at_least_as_good_as_one_bucket(backward):
    for from_the_end in (False, True):
        cap = best_single_size(backward, from_the_end=from_the_end)
        cut = ddp_layout(backward.sizes, (cap,), from_the_end=from_the_end)
        assert backward.finish_s(cut) <= backward.finish_s((len(backward.sizes),))


def test_communication_that_costs_nothing_is_hidden():
    assert Partition.predicted(BackwardProfile((1, 1), (1.0, 2.0), Link(0, float("inf"))), (1, 2)).hidden == 1


@pytest.mark.parametrize(
    ("ratios", "takes"),
    [
        ([0.9, 0.9, 0.9, 0.9], True),
        ([0.9, 0.9, 0.9, 1.3], True),
        ([0.9, 0.9, 1.0, 1.3], False),  # two of four
        ([1.0, 1.0, 1.0, 1.0], False),  # not faster
        ([1.02, 1.03, 1.02, 0.9], False),
    ],
)
def test_what_is_not_clearly_faster_is_not_taken(ratios, takes):
    assert is_faster(ratios)[0] is takes


def plan(beside=True):
    backward = BackwardProfile((3 * MIB, 3 * MIB, 13 * MIB, MIB), (0.004, 0.008, 0.02, 0.03), Link(5e-4, 1e9), beside)
    default = Partition.predicted(backward, ddp_layout(backward.sizes, DEFAULT_CAPS))
    proposed = Partition.predicted(backward, optimal_layout(backward))
    return BucketPlan(default.achieved(backward, 0.05), proposed, False, "because", 0.03, backward.link, beside)


def test_the_table_shows_both_cuts_what_was_predicted_and_what_came_of_it():
    assert str(plan()).splitlines() == [
        "           buckets, MiB  backward, ms  achieved  hidden, %  achieved",
        "default *  3 17                  48.3      50.0         17         9",
        "proposed   6 13 1                35.7         -         75         -",
        "the backward alone 30 ms, an all-reduce 500 µs a message and 1 GB/s, beside the backward",
        "* because",
    ]


def test_where_nothing_can_be_hidden_the_table_says_so():
    shown = str(plan(beside=False)).splitlines()
    assert shown[1].split()[-4:] == ["52.0", "50.0", "0", "-"]
    assert shown[3].endswith("in the thread of the backward")


def test_many_buckets_are_summed_up():
    partition = Partition(tuple(MIB * size for size in (3, 1, 4, 1, 5, 9, 2)), 0.1, 0.2, 0.3)
    assert partition.cells()[0] == "7 of 1 to 9"
