"""The choice: cheapest of all that fit, by size and by links, and a reason one can read."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from samestep.collectives.choose import choose
from samestep.collectives.plan import Operation
from samestep.collectives.proof import prove
from samestep.errors import UsageError
from samestep.network.links import Link, Links
from samestep.network.pricing import price

ETHERNET = Links(Link(20e-6, 1.25e9), adding_bytes_per_s=5e9)
HOSTS = Links(Link(2e-6, 20e9), Link(30e-6, 1.25e9), local=4, adding_bytes_per_s=5e9)


def seconds(choice):
    return {one.plan.name: one.price.seconds for one in choice.candidates}


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 12])
def test_every_plan_on_offer_is_of_the_operation_and_leaves_the_same_bits(operation, ranks):
    for one in choose(ranks, 1e6, HOSTS, operation, root=ranks - 1).candidates:
        assert (one.plan.operation, one.plan.ranks) == (operation, ranks)
        assert one.plan.root == (ranks - 1 if operation in {"broadcast", "reduce"} else 0)
        assert prove(one.plan).identical


@pytest.mark.parametrize("operation", get_args(Operation))
def test_the_cheapest_comes_first_at_its_own_price(operation):
    for nbytes in (1e2, 1e5, 1e8):
        choice = choose(8, nbytes, ETHERNET, operation)
        prices = [one.price.seconds for one in choice.candidates]
        assert prices == pytest.approx(sorted(prices), rel=1e-9)
        assert choice.seconds == prices[0] == price(choice.plan, nbytes, ETHERNET).seconds
        assert choice.plan is choice.candidates[0].plan


def test_of_equals_the_first_named_wins_though_rounding_says_otherwise():
    for ranks in (4, 8, 16):
        names = list(seconds(choose(ranks, 1e6, ETHERNET)))
        assert names.index("ring") < names.index(f"{ranks} servers")


def test_the_document_shows_a_real_choice():
    assert str(choose(8, 1e6, ETHERNET)) in (Path(__file__).parents[2] / "docs" / "all-reduce.md").read_text("utf-8")


def test_no_two_plans_on_offer_have_one_name():
    for ranks in (1, 2, 7, 8, 16):
        names = [one.plan.name for one in choose(ranks, 1e6, HOSTS).candidates]
        assert len(set(names)) == len(names)


def test_few_bytes_take_the_fewest_rounds_and_many_the_fewest_bytes():
    assert choose(8, 100, ETHERNET).plan.name == "recursive doubling"
    assert choose(8, 1e6, ETHERNET).plan.name == "halving and doubling"
    assert choose(8, 1e9, Links(Link(20e-6, 1.25e9), adding_bytes_per_s=2e9)).plan.name == "segmented ring of 2"


def test_doubling_gives_way_to_halving_where_theory_says():
    # n* = alpha log2 p / (beta (log2 p - 2 (p-1)/p)), from the two closed forms without gamma
    links = Links(Link(10e-6, 1.25e9))
    crossing = 10e-6 * 3 / (1 / 1.25e9 * (3 - 2 * 7 / 8))
    for factor, first in ((0.99, "recursive doubling"), (1.01, "halving and doubling")):
        by_name = seconds(choose(8, factor * crossing, links))
        assert min("recursive doubling", "halving and doubling", key=by_name.__getitem__) == first


def test_hosts_are_used_where_there_are_several_with_several_ranks_each():
    assert choose(24, 1e6, HOSTS).plan.name.startswith("hierarchical 6x4")
    for ranks, links in ((4, HOSTS), (6, HOSTS), (8, ETHERNET)):
        assert not [name for name in seconds(choose(ranks, 1e6, links)) if name.startswith("hierarchical")]


def test_a_torus_goes_in_as_many_directions_as_there_are_ports():
    wired = Links(Link(1e-6, 1e9), ports=4)
    assert {"torus 4x4", "torus 4x4 in 2 directions", "torus 4x4 in 4 directions"} <= set(
        seconds(choose(16, 1e8, wired))
    )
    assert "torus 4x4 in 2 directions" not in seconds(choose(16, 1e8, ETHERNET))
    assert not [name for name in seconds(choose(7, 1e8, wired)) if name.startswith("torus")]


def test_a_broadcast_of_many_bytes_is_cut_into_pieces():
    assert choose(8, 100, ETHERNET, "broadcast").plan.name == "binomial tree"
    assert choose(8, 1e8, ETHERNET, "broadcast").plan.blocks > 8


REASON = """\
all-reduce of 1 MB over 4 ranks: halving and doubling, 1.43 ms predicted
links: 20 µs a message and 1.25 GB/s, adding 5 GB/s

                           total   latency  transfer    adding    rounds
  halving and doubling   1.43 ms     80 µs    1.2 ms    150 µs         4
  torus 2x2              1.43 ms     80 µs    1.2 ms    150 µs         4
  segmented ring of 2    1.44 ms    240 µs    1.2 ms       0 s        12
  ring                   1.47 ms    120 µs    1.2 ms    150 µs         6
  4 servers              1.47 ms    120 µs    1.2 ms    150 µs         2
  recursive doubling     2.04 ms     40 µs    1.6 ms    400 µs         2
  double tree of 4       2.62 ms    400 µs      2 ms    225 µs        20
  binomial tree          3.68 ms     80 µs    3.2 ms    400 µs         4
  1 server               5.52 ms    120 µs    4.8 ms    600 µs         2

halving and doubling and torus 2x2 cost the same"""


def test_the_reason_is_a_table_and_a_sentence():
    assert str(choose(4, 1e6, ETHERNET)) == REASON


def test_the_sentence_says_what_is_gained_and_what_it_costs():
    assert str(choose(8, 1e3, ETHERNET)).splitlines()[-1] == (
        "recursive doubling beats halving and doubling by 48 %: 60 µs less latency, 1 µs more transfer, "
        "425 ns more adding (3 rounds, not 6)"
    )
    assert str(choose(1, 1e3, ETHERNET)).splitlines()[-1] == (
        "nothing has to be sent, so recursive doubling is as good as any"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0, 1e6, ETHERNET), "over 0 ranks"),
        ((4, -1, ETHERNET), "a buffer of -1 bytes: give 0 or more"),
        ((4, 1e6, ETHERNET, "all_to_all"), "no operation 'all_to_all': choose one of all_reduce, "),
        ((4, 1e6, ETHERNET, "broadcast", 4), "rank 4 cannot be the root"),
    ],
    ids=str,
)
def test_an_impossible_task_is_refused(arguments, problem):
    with pytest.raises(UsageError, match=problem):
        choose(*arguments)
