from __future__ import annotations

import pytest

from samestep.checkpoints.interval import SaveInterval, parse_interval
from samestep.errors import UsageError


@pytest.mark.parametrize(
    ("every", "meaning"),
    [
        (None, SaveInterval()),
        (1, SaveInterval(steps=1)),
        ("100 steps", SaveInterval(steps=100)),
        ("30 s", SaveInterval(seconds=30)),
        ("30s", SaveInterval(seconds=30)),
        ("90 seconds", SaveInterval(seconds=90)),
        ("10 min", SaveInterval(seconds=600)),
        ("1 minute", SaveInterval(seconds=60)),
        (" 1.5 H ", SaveInterval(seconds=5400)),
        ("2 hours", SaveInterval(seconds=7200)),
        ("1 epoch", SaveInterval(epochs=1)),
        ("5 epochs", SaveInterval(epochs=5)),
    ],
)
def test_each_form_is_understood(every, meaning):
    assert parse_interval(every) == meaning


@pytest.mark.parametrize(
    "every", [0, -3, True, 1.5, "", "ten minutes", "10", "0 s", "-1 s", "1.5 epochs", "10 m", "1 min 30 s"]
)
def test_anything_else_is_refused_with_the_list_of_forms(every):
    with pytest.raises(UsageError, match=r"'30 s', '10 min', '2 h'"):
        parse_interval(every)
