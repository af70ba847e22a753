"""A rank's own time beside that of the others: the median of those without it, the lower of two."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.reporting.steps import _beyond


def test_of_two_ranks_each_is_held_against_the_other():
    assert _beyond(np.array([[0.02], [0.06]])).tolist() == [[pytest.approx(-2 / 3)], [pytest.approx(2)]]


@pytest.mark.parametrize("ranks", range(2, 10))
def test_it_is_the_median_of_the_others_in_every_column(ranks):
    own = np.random.default_rng(ranks).choice([1.0, 2.0, 3.0, 4.0, 5.5], size=(ranks, 50))
    others = [np.sort(np.delete(own, row, axis=0), axis=0)[(ranks - 2) // 2] for row in range(ranks)]
    expected = [own[row] / others[row] - 1 for row in range(ranks)]
    assert np.allclose(_beyond(own), expected)


def test_a_rank_alone_has_nobody_beside_it():
    assert _beyond(np.array([[3.0, 0.0]])).tolist() == [[0.0, 0.0]]
