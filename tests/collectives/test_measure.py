"""Links measured: what a known link gives, and what real ranks give."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from samestep.collectives import measure
from samestep.collectives.measure import SIZES, _Timer
from samestep.errors import UsageError
from samestep.network.links import Link


class Known:
    """A transport of rank 0 over a link that takes what it says, by a clock of its own."""

    def __init__(self, size, link):
        self.rank, self.size = 0, size
        self.link = link
        self.now = 0.0
        self.heard = []

    def isend(self, tensor, target, tag):
        return Sent(self, 0)

    def irecv(self, tensor, source, tag):
        self.heard.append((source, tensor.numel()))
        return Sent(self, self.link.seconds(tensor.numel()))


class Sent:
    def __init__(self, known, seconds):
        self.known, self.seconds = known, seconds

    def wait(self):
        self.known.now += self.seconds


def test_a_known_link_is_found_again():
    link = Link(latency_s=35e-6, bytes_per_s=2.5e9)
    known = Known(4, link)
    found = _Timer(known, SIZES, lambda: known.now).link(range(4))
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-4)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-4)


def test_each_rank_hears_from_the_one_before_it_on_the_ring():
    known = Known(6, Link(1e-6, 1e9))
    _Timer(known, SIZES, lambda: known.now).link([0, 2, 4])
    assert {source for source, size in known.heard if size in SIZES} == {4}


def test_a_rank_that_is_not_on_the_ring_only_waits_for_the_others():
    known = Known(4, Link(1e-6, 1e9))
    assert _Timer(known, SIZES, lambda: known.now).link([1, 3]) is None
    assert not {size for _, size in known.heard} & set(SIZES)


@pytest.mark.parametrize("series", [1, 7])
def test_as_many_series_are_timed_as_asked_for(series):
    known = Known(2, Link(latency_s=35e-6, bytes_per_s=2.5e9))
    _Timer(known, (100, 200), lambda: known.now, series).link(range(2))
    assert [size for _, size in known.heard].count(100) == series * measure.MESSAGES


def measured(local, crowds=False):
    dist.init_process_group("gloo")
    return measure.measure(dist.group.WORLD, local, sizes=(8, 1 << 16), crowds=crowds)


def test_all_ranks_are_given_the_same_figures(four_ranks):
    first, *others = four_ranks(measured, None)
    assert others == [first] * 3
    assert first.between is None
    assert 0 <= first.inside.latency_s < 1
    assert first.inside.bytes_per_s > 1e5
    assert 1e6 < first.adding_bytes_per_s < float("inf")


def test_hosts_have_links_of_their_own(four_ranks):
    links = four_ranks(measured, 2)[3]
    assert links.local == 2
    assert links.between is not None
    assert links.between != links.inside


def test_one_rank_a_host_has_one_link(three_ranks):
    links = three_ranks(measured, 1)[0]
    assert links.between is None
    assert links.local is None


def test_what_a_crowd_takes_longer_is_the_bandwidth_that_is_left():
    known = Known(6, Link(latency_s=35e-6, bytes_per_s=2.5e9))
    twice = Link(latency_s=35e-6, bytes_per_s=5e9)  # what a message alone would have had
    timer = _Timer(known, SIZES, lambda: known.now)
    assert timer.crowded(range(6), twice) == pytest.approx(0.5, rel=1e-3)
    assert timer.crowded(range(6), known.link) == 1.0
    assert timer.crowded(range(6), Link(0.0, float("inf"))) == 1.0  # nothing can be a part of that
    assert [source for source, size in known.heard if size == max(SIZES) // 5][:5] == [1, 2, 3, 4, 5]


def test_crowds_are_measured_among_three_hosts_or_more(three_ranks):
    first, *others = three_ranks(measured, 1, True)
    assert others == [first] * 2
    assert 0 < first.crowded <= 1


def test_links_need_two_ranks_and_even_hosts():
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    with pytest.raises(UsageError, match="cannot be measured among 1 ranks"):
        measure.measure(alone)


def uneven(local):
    dist.init_process_group("gloo")
    dist.barrier()  # who leaves at once would leave others that are still connecting
    with pytest.raises(UsageError, match=f"among 3 ranks, {local} on each host"):
        measure.measure(dist.group.WORLD, local)


@pytest.mark.parametrize("local", [0, 2])
def test_hosts_of_different_sizes_cannot_be_measured(three_ranks, local):
    three_ranks(uneven, local)
