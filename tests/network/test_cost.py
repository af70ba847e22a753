"""The price of rounds, on plans small enough to count by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest

from samestep.collectives import doubling, halving, hierarchical, ring
from samestep.network.cost import Price, price
from samestep.network.links import Link, Links


class Sent(NamedTuple):
    source: int
    target: int
    begin: int
    end: int
    adds: bool = False


class Rounds(NamedTuple):
    blocks: int
    rounds: tuple


ALPHA, BETA, GAMMA = Fraction(100), Fraction(1), Fraction(1, 4)
LINKS = Links(Link(ALPHA, 1 / BETA), adding_bytes_per_s=1 / GAMMA)
N = Fraction(8)  # bytes


def seconds(*rounds, blocks=1, links=LINKS):
    return price(Rounds(blocks, rounds), N, links).seconds


def test_a_plan_without_rounds_is_free():
    assert seconds() == 0


def test_one_message_costs_its_latency_and_its_bytes():
    assert price(Rounds(1, ([Sent(0, 1, 0, 1)],)), N, LINKS) == Price(ALPHA, N * BETA, 0)


def test_sending_and_receiving_at_once_costs_no_more():
    assert seconds([Sent(0, 1, 0, 1, True), Sent(1, 0, 0, 1, True)]) == ALPHA + N * BETA + N * GAMMA


def test_messages_from_one_rank_leave_one_after_another():
    assert seconds([Sent(0, 1, 0, 1), Sent(0, 2, 0, 1)]) == 2 * (ALPHA + N * BETA)


def test_messages_to_one_rank_arrive_one_after_another():
    assert seconds([Sent(1, 0, 0, 1, True), Sent(2, 0, 0, 1, True)]) == 2 * (ALPHA + N * BETA + N * GAMMA)


def test_messages_between_other_ranks_cost_nothing_more():
    assert seconds([Sent(0, 1, 0, 1), Sent(2, 3, 0, 1)]) == ALPHA + N * BETA


def test_a_round_lasts_as_long_as_its_slowest_rank():
    assert seconds([Sent(0, 1, 0, 4), Sent(2, 3, 0, 1)], blocks=4) == ALPHA + N * BETA


def test_several_ports_take_messages_side_by_side_but_cut_none():
    two = Links(LINKS.inside, ports=2)
    even = [Sent(0, 1, 0, 2), Sent(0, 2, 2, 4)]
    assert seconds(even, blocks=4, links=two) == ALPHA + N / 2 * BETA
    uneven = [Sent(0, 1, 0, 3), Sent(0, 2, 3, 4)]
    assert seconds(uneven, blocks=4, links=two) == ALPHA + N * 3 / 4 * BETA


def test_what_is_sent_on_must_be_added_first():
    passed_on = ([Sent(0, 1, 0, 1, True)], [Sent(1, 2, 0, 1, True)])
    assert seconds(*passed_on) == 2 * (ALPHA + N * BETA) + 2 * N * GAMMA


def test_what_is_replaced_must_be_added_first():
    replaced = ([Sent(0, 1, 0, 1, True)], [Sent(2, 1, 0, 1)])
    assert seconds(*replaced) == 2 * (ALPHA + N * BETA) + N * GAMMA


def test_what_nobody_waits_for_is_added_while_the_next_round_travels():
    apart = ([Sent(0, 1, 0, 1, True)], [Sent(1, 2, 1, 2, True)])
    assert seconds(*apart, blocks=2) == 2 * (ALPHA + N / 2 * BETA) + N / 2 * GAMMA  # the last is added at the end


def test_adding_that_takes_longer_than_the_next_round_shows_for_the_rest():
    slow = Links(Link(ALPHA, 1 / BETA), adding_bytes_per_s=Fraction(1, 100))
    apart = ([Sent(0, 1, 0, 1, True)], [Sent(1, 2, 1, 2)])
    assert seconds(*apart, blocks=2, links=slow) == ALPHA + N / 2 * BETA + N / 2 * 100


TWO_HOSTS = Links(Link(Fraction(1), Fraction(10)), Link(Fraction(50), Fraction(1)), local=2)


def test_messages_between_hosts_take_the_slower_link():
    assert seconds([Sent(0, 1, 0, 1)], links=TWO_HOSTS) == 1 + N / 10
    assert seconds([Sent(1, 2, 0, 1)], links=TWO_HOSTS) == 50 + N


def test_ranks_of_a_host_share_its_nic():
    both = [Sent(0, 2, 0, 1), Sent(1, 3, 0, 1)]
    assert seconds(both, links=TWO_HOSTS) == 50 + 2 * N
    railed = Links(TWO_HOSTS.inside, TWO_HOSTS.between, local=2, nics=2)
    assert seconds(both, links=railed) == 50 + N


def test_what_enters_a_host_shares_its_nic_too():
    assert seconds([Sent(2, 0, 0, 1), Sent(4, 1, 0, 1)], links=TWO_HOSTS) == 50 + 2 * N


def test_a_host_that_sends_and_receives_at_once_does_so_at_full_speed():
    assert seconds([Sent(0, 2, 0, 1, True), Sent(3, 1, 0, 1, True)], links=TWO_HOSTS) == 50 + N


def test_halving_keeps_its_largest_halves_on_the_host():
    far_first = halving.reduce_scatter(8)
    near_first = Rounds(8, halving.all_reduce(8).rounds[:3])
    links = Links(Link(0, Fraction(100)), Link(0, Fraction(1)), local=4)
    assert price(near_first, N, links).seconds < price(far_first, N, links).seconds / 3


def test_a_hierarchy_sends_less_through_the_nic_than_a_ring_where_hosts_are_few():
    links = Links(Link(0, float("inf")), Link(0, 1.0), local=8)
    assert price(hierarchical.all_reduce(16, 8), 16, links).seconds == 16
    assert price(ring.all_reduce(16), 16, links).seconds == 30


@pytest.mark.parametrize(
    "plan", [ring.all_reduce(6), doubling.all_reduce(6), halving.all_reduce(6)], ids=lambda p: p.name
)
def test_the_parts_of_a_price_are_the_whole(plan):
    cost = price(plan, N, LINKS)
    assert cost.latency_s + cost.transfer_s + cost.adding_s == cost.seconds
    assert min(cost.latency_s, cost.transfer_s, cost.adding_s) > 0
