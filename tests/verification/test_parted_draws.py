"""Ranks that draw the same order of samples, until one of them has drawn something else in between."""

from __future__ import annotations

import pytest
from journals import Event, record, step, stepped

from samestep.verification.judging import parted
from samestep.verification.judging.record import Record


def ranks(*orders: str, shares: tuple[str, ...] = ("ab", "cd", "ef", "gh")) -> list[list[Event]]:
    """Two ranks that draw at steps 0 and 2, and use two of the samples that each step has."""
    told: list[list[Event]] = [[], []]
    names: Event = {"kind": "names", "optimizer": 0, "names": ["w"], "shapes": [[4]]}
    for number, events in enumerate(told):
        events.append(names)
        for window, share in enumerate(shares):
            if not window % 2:
                drawn = orders[window // 2].split("|")[number]
                events.append({"kind": "draw", "place": f"{window}|train.py:46|1", "digest": drawn})
            events.append({"kind": "input", "window": window, "rows": [share[number]]})
            events += [step(window, "g"), stepped(window)]
    return told


def one_process(*shares: str) -> Record:
    events: list[Event] = []
    for window, share in enumerate(shares):
        events += [{"kind": "input", "window": window, "rows": list(share)}, step(window, "g"), stepped(window)]
    return record(events)


ALONE = one_process("ab", "cd", "ef", "gh")


def test_a_draw_that_ranks_no_longer_share_is_named() -> None:
    (found,) = parted.judge(record(*ranks("one|one", "two|other", shares=("ab", "cd", "ea", "gb"))), lambda: ALONE)
    assert (found.code, found.rank, found.step, found.where) == ("samples-repeated", 1, 2, "train.py:46")


@pytest.mark.parametrize(
    ("orders", "shares"),
    [
        (("one|one", "two|two"), ("ab", "cd", "ea", "gb")),  # one process draws by itself, too
        (("one|its own", "two|other"), ("ab", "cd", "ea", "gb")),  # as from the beginning
        (("one|one", "two|other"), ("ab", "cd", "ef", "gh")),  # it chooses no samples
        (("one|one", "two|other"), ("xb", "cd", "ea", "gb")),  # they never were one process's
    ],
)
def test_other_draws_are_not_accused(orders: tuple[str, ...], shares: tuple[str, ...]) -> None:
    assert [*parted.judge(record(*ranks(*orders, shares=shares)), lambda: ALONE)] == []
