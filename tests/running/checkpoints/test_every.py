from __future__ import annotations

import pytest

from samestep.errors import UsageError
from samestep.running.checkpoints.every import Every, parse_every


@pytest.mark.parametrize(
    ("every", "meaning"),
    [
        (None, Every()),
        (1, Every(steps=1)),
        ("100 steps", Every(steps=100)),
        ("30 s", Every(seconds=30)),
        ("30s", Every(seconds=30)),
        ("90 seconds", Every(seconds=90)),
        ("10 min", Every(seconds=600)),
        ("1 minute", Every(seconds=60)),
        (" 1.5 H ", Every(seconds=5400)),
        ("2 hours", Every(seconds=7200)),
        ("1 epoch", Every(epochs=1)),
        ("5 epochs", Every(epochs=5)),
    ],
)
def test_each_form_is_understood(every, meaning):
    assert parse_every(every) == meaning


@pytest.mark.parametrize(
    "every", [0, -3, True, 1.5, "", "ten minutes", "10", "0 s", "-1 s", "1.5 epochs", "10 m", "1 min 30 s"]
)
def test_anything_else_is_refused_with_the_list_of_forms(every):
    with pytest.raises(UsageError, match=r"'30 s', '10 min', '2 h'"):
        parse_every(every)
