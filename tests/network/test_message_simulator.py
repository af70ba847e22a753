"""Messages followed in time: by hand, and where the load of links says the same."""

from __future__ import annotations

import pytest
from message_simulator import messages_of, play

from samestep.collectives import doubling, halving, tree
from samestep.collectives import ring as ring_plan
from samestep.network import placement
from samestep.network.links import Link
from samestep.network.messages import send
from samestep.network.pricing import PlacedNetwork, contended_price
from samestep.network.routing import ECMP
from samestep.network.topologies.fat_tree import leaf_spine
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.topology import LinkTypes, Switch
from samestep.network.topologies.torus import Torus, ring

SLOW = LinkTypes(Link(0.0, 100.0))
CABLES = LinkTypes(Link(1e-6, 12.5e9))
PLANS = {
    "ring": ring_plan.all_reduce(16),
    "halving and doubling": halving.all_reduce(16),
    "recursive doubling": doubling.all_reduce(16),
    "binomial tree": tree.all_reduce(16),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def seconds(messages, network):
    return play(messages, network, placement.linear(network, network.hosts))


def test_nothing_takes_no_time():
    assert seconds([], ring(SLOW, 4)) == 0
    assert seconds([[(0, 1, 0)]], ring(SLOW, 4)) == 0


def test_who_shares_a_link_has_what_others_leave():
    # 0 to 3 passes with both others, and has half of each link; then 0 to 1 and 2 to 3 have the rest for themselves
    line = ring(SLOW, 8)
    assert seconds([[(0, 3, 100), (0, 1, 100), (2, 3, 100)]], line) == pytest.approx(2.0)
    # a third one on the first link: a third each there; the last link's other message has two thirds
    alone = [[(0, 3, 100), (0, 1, 100), (0, 2, 100), (2, 3, 200)]]
    assert seconds(alone, line) == pytest.approx(3.0)


def test_a_message_that_ends_leaves_its_rate_to_others():
    assert seconds([[(0, 1, 50), (0, 1, 150)]], ring(SLOW, 4)) == pytest.approx(2.0)  # 1 s by halves, then 1 alone
    assert seconds([[(0, 1, 50), (0, 1, 100), (0, 2, 300)]], ring(SLOW, 8)) == pytest.approx(4.5)


def test_a_message_that_must_be_expected_leaves_once_its_sender_knows_that_it_is():
    slow = Switch(LinkTypes(Link(2.0, 100.0)), 4)  # 4 s from host to host

    def expected(*messages):
        return play(messages, slow, placement.linear(slow, 4), expected=True)

    assert expected([(0, 1, 100)]) == pytest.approx(4 + 1)  # both there at once: 2 to hear of it, 2 under way
    assert expected([(0, 1, 100)], [(1, 2, 100)]) == pytest.approx(5 + 2 + 1)  # 2 has waited for long
    # 0's last byte leaves after 3, so that 1 hears of 0 after 5, when it has received: it can answer at once
    assert expected([(0, 1, 100)], [(1, 0, 100)]) == pytest.approx(5 + 2 + 1)
    assert expected([(0, 1, 100), (1, 0, 100)], [(0, 1, 100), (1, 0, 100)]) == pytest.approx(2 * 5)  # a ring's rounds


def test_a_rank_waits_for_its_own_messages_and_for_nobody_elses():
    network = Switch(SLOW, 6)
    apart = [[(0, 1, 100), (2, 3, 1000)], [(1, 0, 100), (4, 5, 700)]]
    assert seconds(apart, network) == pytest.approx(10.0)
    behind = [[(0, 1, 100), (2, 3, 1000)], [(3, 1, 100)]]
    assert seconds(behind, network) == pytest.approx(11.0)


def test_who_receives_for_a_later_round_is_not_held_up():
    network = Switch(SLOW, 4)
    # rank 3 sends for round 2 at once; rank 0 is at round 1 until then, and shares nothing with it
    assert seconds([[(0, 1, 500)], [(3, 0, 100)], [(0, 2, 100)]], network) == pytest.approx(6.0)


def test_ranks_of_one_host_have_links_of_their_own():
    network = Switch(LinkTypes(Link(0.0, 100.0), intra_host=Link(0.0, 1000.0), ranks_per_host=2), 2)
    placed = placement.linear(network, 4)
    assert play([[(0, 1, 1000), (2, 3, 1000)]], network, placed) == pytest.approx(1.0)
    assert play([[(0, 2, 100), (1, 3, 100)]], network, placed) == pytest.approx(2.0)  # one port for both


def test_equal_ways_carry_a_part_each():
    network = leaf_spine(SLOW, leaves=2, hosts=2, spines=2)
    placed = placement.linear(network, 4)
    assert play([[(0, 2, 100), (1, 3, 100)]], network, placed, ECMP) == pytest.approx(1.0)


UNIFORM = [Switch(CABLES, 16), Torus(CABLES, (4, 4)), leaf_spine(CABLES, 4, 4, 4), leaf_spine(CABLES, 4, 4, 2)]


@every_plan
@pytest.mark.parametrize("network", UNIFORM, ids=[one.name for one in UNIFORM])
def test_where_all_ranks_do_the_same_at_once_the_load_of_links_says_as_much(network, plan):
    placed = placement.linear(network, 16)
    assert play(messages_of(plan, 16e6), network, placed) == pytest.approx(
        contended_price(plan, 16e6, network, placed).seconds
    )


def test_along_a_circuit_of_a_slim_fly_within_1_percent():
    network = SlimFly(CABLES, 5, 1)
    placed = placement.circuit(network, 50)
    ranks = range(50)
    expected = PlacedNetwork(network, placed).price([send(ranks, [(rank + 1) % 50 for rank in ranks])] * 3, 1e6)
    rounds = [[(rank, (rank + 1) % 50, 1e6) for rank in ranks]] * 3
    assert play(rounds, network, placed) == pytest.approx(expected.seconds, rel=0.01)


@every_plan
@pytest.mark.parametrize("seed", range(3))
def test_at_random_ranks_that_go_on_by_themselves_take_about_as_long(plan, seed):
    """Less, since nobody waits for the slowest of a round; or more, since links are idle at times."""
    for network in UNIFORM:
        placed = placement.random(network, 16, seed)
        expected = contended_price(plan, 16e6, network, placed).seconds
        assert 0.75 < play(messages_of(plan, 16e6), network, placed) / expected < 1.15
