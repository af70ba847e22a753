"""The torus: every hop to a neighbour, every direction used."""

from __future__ import annotations

import pytest

from samestep.collectives import torus
from samestep.errors import UsageError


def step(one, rows, columns):
    """(rows down, columns right) of a transfer, round the edges: a neighbour is one step from here."""
    down = (one.target // columns - one.source // columns) % rows
    right = (one.target % columns - one.source % columns) % columns
    return (down if down <= rows // 2 else down - rows, right if right <= columns // 2 else right - columns)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_message_goes_to_a_neighbour(parts):
    for transfers in torus.all_reduce(5, 7, parts).rounds:
        for one in transfers:
            assert sorted(map(abs, step(one, 5, 7))) == [0, 1]


def test_rows_come_before_columns_and_after_them():
    ways = [{step(one, 3, 4) for one in transfers} for transfers in torus.all_reduce(3, 4).rounds]
    assert ways == [{(0, 1)}] * 3 + [{(1, 0)}] * 4 + [{(0, 1)}] * 3


def test_four_parts_use_all_four_directions_of_every_rank_in_every_round():
    for transfers in torus.all_reduce(4, 4, parts=4).rounds:
        used = {(one.source, step(one, 4, 4)) for one in transfers}
        assert len(used) == len(transfers) == 4 * 16


def test_rounds_are_few():
    assert len(torus.all_reduce(8, 8).rounds) == 28  # one ring takes 126
    assert len(torus.all_reduce(8, 8, parts=4).rounds) == 28


def test_every_rank_sends_as_little_as_in_a_ring():
    assert torus.all_reduce(3, 5).bytes_sent(15) == 28
    assert torus.reduce_scatter(3, 5).bytes_sent(15) == 14
    assert torus.all_gather(3, 5).bytes_sent(15) == 14


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [((0, 3), "rows is 0"), ((3, 0), "columns is 0"), ((2, 2, 3), "cut into 3 parts: give 1, 2 or 4")],
    ids=str,
)
def test_an_impossible_grid_is_refused(arguments, problem):
    with pytest.raises(UsageError, match=problem):
        torus.all_reduce(*arguments)


def test_grids_of_the_other_operations_are_checked_too():
    for make in (torus.reduce_scatter, torus.all_gather):
        with pytest.raises(UsageError, match="rows is 0"):
            make(0, 2)
