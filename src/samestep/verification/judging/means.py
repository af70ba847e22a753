"""Whether an average over ranks is that over samples, by what the ranks' losses are made of.

Means of as many values on every rank may be averaged. A loss that is made otherwise leaves it open: a sum, a mean over
what each rank counts for itself, or one whose values may depend on several samples, such as similarities of all pairs.
"""

from __future__ import annotations

from typing import Any

from samestep.verification.journal import Event
from samestep.verification.judging.record import Record

__all__: list[str] = []


def are_alike(record: Record, step: Event) -> bool:
    """Returns whether the losses of all backward passes of a step, on all ranks, are means of as many values."""
    passes = [
        one["terms"]
        for rank in record.data.ranks
        for one in rank.by_window.get(step["window"], [])
        if one["kind"] == "backward"
    ]
    if not passes or not passes[0] or any(len(terms) != len(passes[0]) for terms in passes):
        return False
    return all(_are_alike([terms[number] for terms in passes]) for number in range(len(passes[0])))


def _are_alike(terms: list[dict[str, Any]]) -> bool:
    """Whether one term of all passes is the mean of as many values everywhere, each of which one sample makes."""
    first = terms[0]
    alike = all((one["mean"], one["factor"], one["count"]) == (True, first["factor"], first["count"]) for one in terms)
    return alike and bool(first["count"]) and not _may_be_pairs(first["shape"])


def _may_be_pairs(shape: list[int]) -> bool:
    """Whether there is a column for every row, or several: a row may be a sample, and a column another one."""
    return len(shape) == 2 and shape[1] >= shape[0] > 1 and shape[1] % shape[0] == 0
