"""Whether the ranks together use the samples of one process, where no DataLoader tells which they are.

The rows that the models get are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, Finding, unchecked
from samestep.verification.journal import Event, place_of
from samestep.verification.judging import own_pace
from samestep.verification.judging.record import Rank, Record, Run, calls_in, place_of_draw, reductions
from samestep.verification.judging.samples import left_out, passed_over
from samestep.verification.report import Report

_CUT = 0.75  # of the samples of one process, at most, that a rank has where the data are cut
_MOST_AGAIN = 0.4  # of the samples of a step that were in the step before; of two ranks half of them
_BY_CHANCE = 0.02  # of the samples that may be alike without being one
_NO_LOADER = "no DataLoader tells which samples were trained on"


def judge(record: Record, whole: Record, alone: Callable[[], Record], report: Report) -> None:
    """Compares the samples that the ranks' models get with those of one process.

    `whole` is the script alone, which takes as many steps; `alone` records it for as many samples as the ranks use.
    """
    if (where := _drawn_at(record, whole)) is not None:
        report.cover("data", DECLARED, f"each rank draws them at {where}, other ones than the other ranks")
        return
    mine, theirs = _rows_of(record), _rows_of(alone())
    if (count := _overlap(record, alone())) > _BY_CHANCE * len(mine):
        report.add([_overlapping(count, _trained_at(record))])
    elif (share := _repeated(record.data.ranks)) >= _MOST_AGAIN and _repeated(alone().ranks[:1]) <= _BY_CHANCE:
        report.add([_repeated_in_next_step(share, _trained_at(record))])
    elif count := passed_over([_in_order(rank) for rank in record.data.ranks], _in_order(*alone().ranks[:1])):
        report.add([left_out(count, _trained_at(record))])
    elif not mine or not theirs:
        report.cover("data", unchecked(f"{_NO_LOADER}, and the inputs of the models have no rows to compare"))
    elif mine == theirs:
        report.cover("data", AGREES, f"the {len(mine)} samples that one process uses, by what the models get")
    elif own_pace.worst_error(record, alone(), record.kept_steps) is not None:
        report.cover("data", AGREES, "one process that goes its own way has the same gradients")
    else:
        why = (
            f"{_NO_LOADER}; the ranks' models get {plural(len(mine), 'different sample')}, those of one process "
            f"{len(theirs)}, and {len(mine & theirs)} of them are the same"
        )
        report.cover("data", unchecked(why))


def _trained_at(record: Record) -> str:
    """The line of the first backward pass."""
    return record.ranks[0].backward_of(record.ranks[0].steps[0])


def _drawn_at(record: Record, whole: Record) -> str | None:
    """The line at which each rank draws its samples, or their places, as one process does, and none as another rank."""
    drawn = [{one["place"]: one for one in rank.of("draw") if not one["within"]} for rank in record.data.ranks]
    alone = {one["place"]: one["shape"] for rank in whole.ranks[:1] for one in rank.of("own_draw")}
    for place, first in drawn[0].items() if drawn else ():
        draws = [first, *(theirs[place] for theirs in drawn[1:] if place in theirs)]
        digests = {one["digest"] for one in draws}
        same = len(draws) == len(drawn) and all(one["shape"] == first["shape"] for one in draws)
        if same and alone.get(place) == first["shape"] and None not in digests and len(digests) == len(drawn):
            return place_of_draw(first)[1]
    return None


def _overlap(record: Record, alone: Record) -> int:
    """How many samples several ranks use before any of them begins again, where each goes over a part of the data.

    A rank that draws from all data meets a sample again after as many others as one process does, not after an Nth.
    """
    parts = [_until_repeated(rank) for rank in record.data.ranks]
    whole = _until_repeated(alone.ranks[0]) if alone.ranks else set()
    are_cut = all(part and len(part) <= _CUT * len(whole) for part in parts)
    return sum(map(len, parts)) - len(set().union(*parts)) if are_cut else 0


def left_out_of_one_batch(record: Record, alone: Record) -> Finding | None:
    """Returns the finding for ranks that leave out a part of the one batch that one process has at every step.

    Fewer samples than there are ranks may be what is left of a batch that is cut in equal parts.
    """
    mine, theirs = _by_step(record.data.ranks), _by_step(alone.ranks[:1])
    windows = [window for window in mine if window in theirs]
    if len(windows) < 2 or any(rows[one] != rows[windows[0]] for rows in (mine, theirs) for one in windows):
        return None
    ours, whole = mine[windows[0]], theirs[windows[0]]
    if not ours < whole or len(whole - ours) < record.size:
        return None
    return Finding(
        code="samples-missing",
        where=_trained_at(record),
        cause=f"one process trains on {plural(len(whole), 'sample')} at every step, and the ranks together on "
        f"{len(ours)} of them: {len(whole - ours)} are in no rank's part",
        fix="make the samples first and divide them after that: a part of a text has fewer windows than its share",
    )


def _repeated(ranks: Sequence[Rank]) -> float:
    """What share of the samples of a step were in the step before, on any of these ranks; of all steps the mean."""
    steps = list(_by_step(ranks).values())
    shares = [len(one & before) / len(one) for before, one in pairwise(steps)]
    return sum(shares) / len(shares) if shares else 0.0


def _by_step(ranks: Sequence[Rank]) -> dict[int, set[str]]:
    """Window -> the rows that the models of these ranks get in it."""
    found: dict[int, set[str]] = {}
    for event in _with_rows(*ranks):
        found.setdefault(event["window"], set()).update(event["rows"])
    return dict(sorted(found.items()))


def _with_rows(*ranks: Rank) -> list[Event]:
    return [event for rank in ranks for event in rank.of("input") if event["rows"]]


def _calls(*ranks: Rank) -> list[tuple[str, ...]]:
    """The rows of each call of these ranks' models, in order; a wrapper records it again."""
    calls = dict.fromkeys((event["window"], tuple(event["rows"])) for event in _with_rows(*ranks))
    return [rows for _, rows in calls]


def _in_order(*ranks: Rank) -> list[str]:
    return [row for rows in _calls(*ranks) for row in rows]


def _until_repeated(rank: Rank) -> set[str]:
    """The rows that a rank's models get before one comes again; none where that is not seen, or at once."""
    seen: set[str] = set()
    for call in _calls(rank):
        if seen & set(call):
            return seen
        seen |= set(call)
    return set()


def _rows_of(record: Record) -> set[str]:
    return {row for event in _with_rows(*record.ranks) for row in event["rows"]}


def _repeated_in_next_step(share: float, where: str) -> Finding:
    return Finding(
        code="samples-repeated",
        where=where,
        cause=f"{share:.0%} of the samples of a step were in the step before, on another rank, and in one process none "
        "is: what reads them goes on by the samples of one rank",
        fix="go on by the samples of all ranks after each step: position += batch_size * world_size",
    )


def _overlapping(count: int, where: str) -> Finding:
    return Finding(
        code="samples-repeated",
        where=where,
        cause=f"each rank goes over a part of the data, and {plural(count, 'sample')} are in several ranks' parts "
        "before any rank begins again: the parts are cut out of orders that differ",
        fix="draw the order from a generator that all ranks seed alike, with the epoch, and that nothing else uses",
    )


# --- two ranks with the same samples at every step --------------------------------------------------


def same_on_two_ranks(record: Record, whole: Run, steps: Sequence[Event]) -> Finding | None:
    """Returns the finding for two ranks whose models get the same rows in all steps that were kept.

    That alone is no mistake: the ranks of tensor, sequence and pipeline parallelism get one batch, and each computes a
    part of its own. Where both bring the same gradient, one of them computes in vain. Ranks that hold parts of the
    parameters have no gradient of their own: there one process, `whole`, must get these rows once, and come to the
    gradient of all ranks.
    """
    pair = next((pair for pair in combinations(record.data.ranks, 2) if _have_same_rows(*pair, steps)), None)
    if pair is None:
        return None
    own = [record.own(step) for step in steps]
    if None in own:
        is_same = all(calls_in(whole.rank, step["window"]) == calls_in(pair[0], step["window"]) for step in steps)
    else:
        places = [record.ranks.index(rank) for rank in pair]
        both = [[parts[place] for place in places] for parts in own if parts is not None]
        is_something = any(numerics.flat(one).any() for one, _ in both)  # else nothing tells that they are the same
        is_same = is_something and all(
            numerics.distance(other, one).worst <= numerics.limit(0.0, one) for one, other in both
        )
    return _on_two_ranks(record, *pair, steps) if is_same else None


def _have_same_rows(first: Rank, other: Rank, steps: Sequence[Event]) -> bool:
    """Whether the models of two replicas have got the same rows at all of these steps."""
    mine, theirs = ([calls_in(rank, step["window"]) for step in steps] for rank in (first, other))
    return all(mine) and mine == theirs and _are_replicas(first, other)


def _are_replicas(first: Rank, other: Rank) -> bool:
    """Whether two ranks began with the same parameters, but for those of which each holds a part."""
    mine, theirs = (
        {name: one for event in rank.of("start") for name, one in event["parameters"].items()}
        for rank in (first, other)
    )
    pairs = [(mine.get(name), theirs.get(name)) for name in mine.keys() | theirs.keys()]
    return all(one == two or (one and two and place_of(one) and place_of(two)) for one, two in pairs)


def _on_two_ranks(record: Record, first: Rank, other: Rank, steps: Sequence[Event]) -> Finding:
    is_fixed = len({tuple(calls_in(first, step["window"])) for step in steps}) == 1
    brings_together = bool(record.wrappers) or all(reductions(record.ranks[0], step["window"]) for step in steps)
    which = "one fixed batch at every step" if is_fixed else "the same samples at every step"
    why = f"{record.size} ranks train on fewer samples than they compute"
    if not brings_together:
        why = "nothing is brought together between the ranks, so each trains the whole model by itself"
    return Finding(
        code="samples-repeated",
        severity="note" if is_fixed or not brings_together else "error",
        rank=other.number,
        step=steps[0]["event"],
        where=_drawn_by_both(first, other, steps) or first.backward_of(steps[0]),
        cause=f"rank {other.number} trains on {which}, those of rank {first.number}, and computes the same gradient: "
        f"{why}",
        fix="draw the samples from a generator that is seeded with the rank (torch.manual_seed(seed + rank) once the "
        "model is made), or let each rank take its own part of them",
    )


def _drawn_by_both(first: Rank, other: Rank, steps: Sequence[Event]) -> str | None:
    """The line of numbers that both have drawn in the last of these steps, or else before them."""
    mine, theirs = ({one["place"]: one for one in rank.of("draw")} for rank in (first, other))
    same = [one for place, one in mine.items() if place in theirs and one["digest"] == theirs[place]["digest"]]
    places = [place_of_draw(one) for one in same if one["digest"] is not None]
    last = max((window for window, _ in places if window <= steps[-1]["window"]), default=None)
    return next((where for window, where in places if window == last), None)
