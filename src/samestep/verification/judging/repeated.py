"""Whether two ranks train on the same samples at every step, where no DataLoader tells which they are.

Seen where the models of two ranks get the same rows in all windows that are kept. That alone is no mistake: the ranks
of tensor, sequence and pipeline parallelism get the same batch, and each computes a part of its own. Where both bring
the same gradient, one of them computes in vain. Ranks that hold parts of the parameters tell no gradient of their own:
there it is so where one process, which gets these rows once, comes to the gradient of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import Event, place_of
from samestep.verification.judging.average import calls_in
from samestep.verification.judging.record import REDUCING, Rank, Record
from samestep.verification.judging.single import Run

__all__: list[str] = []


def finding(record: Record, whole: Run, steps: Sequence[Event]) -> Finding | None:
    """Returns what is to be said of these steps, whose gradients are as those of one process.

    Args:
        record: of the ranks.
        whole: the script alone.
        steps: whose values were kept; rank 0's.
    """
    ranks = record.data.ranks
    pair = next((pair for pair in combinations(ranks, 2) if _are_fed_alike(*pair, steps)), None)
    if pair is None:
        return None
    own = [record.own(step) for step in steps]
    if None in own:
        alone = Rank(0, []) if not whole.record.ranks else whole.record.ranks[0]
        is_alike = all(calls_in(alone, step["window"]) == calls_in(pair[0], step["window"]) for step in steps)
    else:
        places = [record.ranks.index(rank) for rank in pair]
        told = [[parts[place] for place in places] for parts in own if parts is not None]
        is_something = any(numerics.flat(first).any() for first, _ in told)  # else nothing tells that they are the same
        is_alike = is_something and all(_are_equal(*both) for both in told)
    return _told(record, pair, steps) if is_alike else None


def _are_equal(first: numerics.Gradients, other: numerics.Gradients) -> bool:
    return numerics.distance(other, first).worst <= numerics.limit(0.0, first)


def _are_fed_alike(first: Rank, other: Rank, steps: Sequence[Event]) -> bool:
    """Whether the models of two replicas have got the same rows at all of these steps."""
    mine = [calls_in(first, step["window"]) for step in steps]
    return all(mine) and mine == [calls_in(other, step["window"]) for step in steps] and _are_replicas(first, other)


def _are_replicas(first: Rank, other: Rank) -> bool:
    """Whether two ranks began with the same parameters, but for those of which each holds a part."""
    begun = [
        {name: one for event in rank.of("start") for name, one in event["parameters"].items()}
        for rank in (first, other)
    ]
    pairs = [(begun[0].get(name), begun[1].get(name)) for name in begun[0].keys() | begun[1].keys()]
    return all(mine == theirs or (mine and theirs and place_of(mine) and place_of(theirs)) for mine, theirs in pairs)


def _told(record: Record, pair: tuple[Rank, Rank], steps: Sequence[Event]) -> Finding:
    first, other = pair
    told = {tuple(calls_in(first, step["window"])) for step in steps}
    is_fixed, brings_together = len(told) == 1, _brings_together(record, steps)
    which = "one fixed batch at every step" if is_fixed else "the same samples at every step"
    why = f"{record.size} ranks train on fewer samples than they compute"
    if not brings_together:
        why = "nothing is brought together between the ranks, so each trains the whole model by itself"
    return Finding(
        code="samples-repeated",
        severity="note" if is_fixed or not brings_together else "error",
        rank=other.number,
        step=steps[0]["event"],
        where=_drawn_at(first, other, steps) or first.backward_of(steps[0]),
        cause=f"rank {other.number} trains on {which}, those of rank {first.number}, and computes the same gradient: "
        f"{why}",
        fix="draw the samples from a generator that is seeded with the rank (torch.manual_seed(seed + rank) once the "
        "model is made), or let each rank take its own part of them",
    )


def _brings_together(record: Record, steps: Sequence[Event]) -> bool:
    """Whether gradients are averaged: by a wrapper, or by what the ranks reduce in each of these steps."""
    windows = [record.ranks[0].by_window.get(step["window"], []) for step in steps]
    reduces = [any(one["kind"] == "collective" and one["op"] in REDUCING for one in each) for each in windows]
    return bool(record.wrappers) or all(reduces)


def _drawn_at(first: Rank, other: Rank, steps: Sequence[Event]) -> str | None:
    """The line of numbers that both have drawn in the last of these steps, or else before them."""
    mine, theirs = ({one["place"]: one for one in rank.of("draw")} for rank in (first, other))
    alike = [place for place, one in mine.items() if place in theirs and one["digest"] == theirs[place]["digest"]]
    alike = [place for place in alike if mine[place]["digest"] is not None]
    windows = [int(place.partition("|")[0]) for place in alike]
    last = max((window for window in windows if window <= steps[-1]["window"]), default=None)
    if last is None:
        return None
    where: str = alike[windows.index(last)].rpartition("|")[0].partition("|")[2]
    return where
