"""The field's laws, for every pair and triple of elements; they are what makes a Slim Fly one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from samestep.errors import UsageError
from samestep.network.topologies.slim_fly import field, nearest_prime_powers, prime_power

ORDERS = [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32]


@pytest.mark.parametrize("q", ORDERS)
def test_it_is_a_field(q):
    this = field(q)
    plus, times = this.add, this.mul
    everything = np.arange(q)
    for table in (plus, times):
        assert (table == table.T).all()
        assert (
            table[table[:, :, None], everything[None, None, :]] == table[everything[:, None, None], table[None]]
        ).all()
    assert (times[:, plus] == plus[times[:, :, None], times[:, None, :]]).all()
    assert (plus[0] == everything).all()
    assert (times[1] == everything).all()
    assert (plus[everything, this.neg] == 0).all()
    assert (times[everything[1:], this.inverse[1:]] == 1).all()
    assert (plus[this.sub[3 % q], everything] == 3 % q).all()


@pytest.mark.parametrize("q", ORDERS)
def test_its_primitive_element_makes_all_others(q):
    this = field(q)
    assert sorted(this.powers) == list(range(1, q))
    if q > 2:
        assert all(this.mul[power, this.powers[1]] == after for power, after in pairwise(this.powers))


def test_adding_an_element_to_itself_p_times_gives_nothing():
    for q, p in ((4, 2), (8, 2), (9, 3), (25, 5), (27, 3), (32, 2)):
        this = field(q)
        for one in range(q):
            total = 0
            for _ in range(p):
                total = this.add[total, one]
            assert total == 0


def test_counting_modulo_a_prime_is_its_field():
    assert all(
        field(7).mul[a, b] == a * b % 7 and field(7).add[a, b] == (a + b) % 7 for a in range(7) for b in range(7)
    )


def test_prime_powers_are_told_from_others():
    assert [q for q in range(-3, 33) if prime_power(q)] == ORDERS


def test_the_nearest_are_named():
    assert (
        nearest_prime_powers(6),
        nearest_prime_powers(15),
        nearest_prime_powers(2, least=3),
        nearest_prime_powers(33),
    ) == ("5 or 7", "13 or 16", "3", "32 or 37")


def test_other_numbers_are_refused():
    with pytest.raises(UsageError, match="there is no field of 12 elements: give a prime power, such as 11 or 13"):
        field(12)
