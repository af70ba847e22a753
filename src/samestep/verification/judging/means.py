"""How an average over samples weighs the ranks, by what their losses are made of.

Means of as many values on every rank count alike; means over different counts by these. A loss that is made otherwise
leaves it open: a sum, or one whose values may depend on several samples, such as similarities of all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samestep.verification.journal import Event
from samestep.verification.judging.record import Record

__all__: list[str] = []


@dataclass(frozen=True)
class Weights:
    """Of the ranks in a mean over all their values.

    Attributes:
        shares: of each; together 1.
        factor: by which each rank's mean is multiplied in its loss, over all backward passes of a step.
        is_plain: whether the losses are means and nothing else.
    """

    shares: tuple[float, ...]
    factor: float
    is_plain: bool


def weights(record: Record, step: Event) -> Weights | None:
    """Returns how a mean over all values would weigh the ranks in a step; None where that is not known."""
    ranks = [_passes(record, rank, step) for rank in range(len(record.data.ranks))]
    first = ranks[0]
    if not first or not first[0] or any(len(passes) != len(first) for passes in ranks):
        return None
    every = [terms for passes in ranks for terms in passes]
    if any(len(terms) != len(first[0]) for terms in every):
        return None
    factor: float = sum(float(terms[0]["factor"]) for terms in first)
    is_plain = len(first) == 1 and len(first[0]) == 1 and factor == 1.0
    if all(_are_alike([terms[number] for terms in every]) for number in range(len(first[0]))):
        return Weights((1 / len(ranks),) * len(ranks), factor, is_plain)
    if len(first) == len(first[0]) == 1 and all(_is_mean(terms[0]) for terms in every):
        counts: list[float] = [float(passes[0][0]["count"]) for passes in ranks]
        factors = {passes[0][0]["factor"] for passes in ranks}
        total = sum(counts)
        if len(factors) == 1 and total:
            return Weights(tuple(count / total for count in counts), factor, is_plain)
    return None


def are_alike(record: Record, step: Event) -> bool:
    """Returns whether the losses of all backward passes of a step, on all ranks, are means of as many values."""
    found = weights(record, step)
    return found is not None and len(set(found.shares)) == 1


def uneven_counts(record: Record, step: Event) -> list[float] | None:
    """Returns over how many values each rank takes the mean in one term of its loss, where they are not as many."""
    ranks = [_passes(record, rank, step) for rank in range(len(record.data.ranks))]
    if any(len(passes) != 1 or len(passes[0]) != len(ranks[0][0]) for passes in ranks):
        return None
    for terms in zip(*(passes[0] for passes in ranks), strict=True):
        counts = [float(term["count"]) for term in terms if _is_mean(term)]
        if len(counts) == len(ranks) and len(set(counts)) > 1:
            return counts
    return None


def _passes(record: Record, rank: int, step: Event) -> list[list[dict[str, Any]]]:
    window = record.data.ranks[rank].by_window.get(step["window"], [])
    return [one.get("terms") or [] for one in window if one["kind"] == "backward"]


def _is_mean(term: dict[str, Any]) -> bool:
    return bool(term["mean"]) and bool(term["count"]) and not _may_be_pairs(term["shape"])


def _are_alike(terms: list[dict[str, Any]]) -> bool:
    """Whether one term of all passes is the mean of as many values everywhere, each of which one sample makes."""
    first = terms[0]
    alike = all((one["factor"], one["count"]) == (first["factor"], first["count"]) for one in terms)
    return alike and all(map(_is_mean, terms))


def _may_be_pairs(shape: list[int]) -> bool:
    """Whether there is a column for every row, or several: a row may be a sample, and a column another one."""
    return len(shape) == 2 and shape[1] >= shape[0] > 1 and shape[1] % shape[0] == 0
