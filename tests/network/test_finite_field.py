"""The field's laws, for every pair and triple of elements; they are what makes a Slim Fly one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from samestep.errors import UsageError
from samestep.network.topologies.field import field, near, prime_power

ORDERS = [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32]


@pytest.mark.parametrize("q", ORDERS)
def test_it_is_a_field(q):
    this = field(q)
    plus, times = np.array(this.sums), np.array(this.products)
    everything = np.arange(q)
    for table in (plus, times):
        assert (table == table.T).all()
        assert (
            table[table[:, :, None], everything[None, None, :]] == table[everything[:, None, None], table[None]]
        ).all()
    assert (times[:, plus] == plus[times[:, :, None], times[:, None, :]]).all()
    assert (plus[0] == everything).all()
    assert (times[1] == everything).all()
    assert all(this.sums[one][this.negatives[one]] == 0 for one in range(q))
    assert all(this.products[one][this.inverse(one)] == 1 for one in range(1, q))
    assert all(this.sums[this.difference(3 % q, one)][one] == 3 % q for one in range(q))


@pytest.mark.parametrize("q", ORDERS)
def test_its_primitive_element_makes_all_others(q):
    this = field(q)
    assert sorted(this.powers) == list(range(1, q))
    if q > 2:
        assert all(this.products[power][this.powers[1]] == after for power, after in pairwise(this.powers))


def test_adding_an_element_to_itself_p_times_gives_nothing():
    for q, p in ((4, 2), (8, 2), (9, 3), (25, 5), (27, 3), (32, 2)):
        this = field(q)
        for one in range(q):
            total = 0
            for _ in range(p):
                total = this.sums[total][one]
            assert total == 0


def test_counting_modulo_a_prime_is_its_field():
    assert all(
        field(7).products[a][b] == a * b % 7 and field(7).sums[a][b] == (a + b) % 7 for a in range(7) for b in range(7)
    )


def test_prime_powers_are_told_from_others():
    assert [q for q in range(-3, 33) if prime_power(q)] == ORDERS


def test_the_nearest_are_named():
    assert (near(6), near(15), near(2, least=3), near(33)) == ("5 or 7", "13 or 16", "3", "32 or 37")


def test_other_numbers_are_refused():
    with pytest.raises(UsageError, match="there is no field of 12 elements: give a prime power, such as 11 or 13"):
        field(12)


def test_nothing_divides_by_zero():
    with pytest.raises(ZeroDivisionError):
        field(9).inverse(0)
