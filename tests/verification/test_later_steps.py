"""Steps whose values are not kept, and whose gradients suddenly have other norms than in one process."""

from __future__ import annotations

import math

import pytest
from journals import record, step

from samestep.verification.judging import later

RIGHT = [1.0, 1.1, 0.9, 1.2, 1.0, 0.8]


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        (RIGHT, None),
        ([1.0, 1.1, 0.9, 1.2, 1.4, 0.8], 4),
        ([1.0, 1.1, 0.9, 1.2, 1.0005, 0.8], None),  # less than is looked into
        ([1.0, 1.1, 0.9, 1.25, 1.1, 0.8], 3),
        ([1.0, 1.1, 0.91, 1.2, 1.1, 0.8], None),  # they have come apart before, at a step that was compared
        ([1.0, 1.1, 0.9, 1.2, math.nan, 0.8], None),
        ([1.0, 1.1, 0.9], None),
    ],
)
def test_a_sudden_difference_of_norms_is_looked_into(theirs: list[float], found: int | None) -> None:
    ours = [step(n, "g", norms={"w": norm}, kept=n if n < 3 else None) for n, norm in enumerate(RIGHT)]
    alone = [{"kind": "rates", "event": n, "norms": {"w": norm}} for n, norm in enumerate(theirs)]
    told = later.sudden(record(ours, ours), record(alone))
    assert (None if told is None else told["event"]) == found


def test_no_gradient_is_one_of_zeros() -> None:
    """Which a hand-written average makes for a layer that is not used yet."""
    ours = [step(n, "g", norms={"w": 1.0, "v": float(n > 1)}) for n in range(4)]
    norms = [{"w": 1.0}, {"w": 1.0}, {"w": 1.0, "v": 3.0}, {"w": 1.0, "v": 3.0}]
    alone = [{"kind": "rates", "event": n, "norms": one} for n, one in enumerate(norms)]
    found = later.sudden(record(ours), record(alone))
    assert found is not None
    assert found["event"] == 2


def test_gradients_of_other_names_are_not_compared() -> None:
    ours = [step(n, "g", norms={"w": 1.0}) for n in range(3)]
    alone = [{"kind": "rates", "event": n, "norms": {"v": 2.0}} for n in range(3)]
    assert later.sudden(record(ours), record(alone)) is None
    assert later.sudden(record(ours), record()) is None
