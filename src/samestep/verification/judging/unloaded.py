"""Whether the ranks together use the samples of one process, where no DataLoader tells which they are.

The rows that the models get are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, Finding, unchecked
from samestep.verification.journal import Event, place_of
from samestep.verification.judging import own_data, own_pace
from samestep.verification.judging.record import Rank, Record, Run, calls_in, place_of_draw, reductions
from samestep.verification.judging.samples import left_out, passed_over
from samestep.verification.report import Report

_CUT = 0.75  # of the samples of one process, at most, that a rank has where the data are cut
_MOST_AGAIN = 0.4  # of the samples of a step that were in the step before; of two ranks half of them
_BY_CHANCE = 0.02  # of the samples that may be alike without being one
_DISTINCT = 0.9  # of the rows of a call, if they are samples
_FIRST = 3  # steps: ranks that each go through their part have one process's samples in one step at most
_ALIKE = 0.25  # of the rows of a step, at least, are those of one process; where ranks draw anew it is none
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
    elif mine == theirs and _are_samples(record):
        report.cover("data", AGREES, f"the {len(mine)} samples that one process uses, by what the models get")
    elif own_pace.worst_error(record, alone(), record.kept_steps) is not None:
        report.cover("data", AGREES, "one process at its own pace has the same gradients")
    elif (found := other_rows(record, alone())) is not None:
        report.add([found])
    elif mine == theirs:
        report.cover("data", unchecked(f"{_NO_LOADER}, and many rows of what the models get are alike"))
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


def other_rows(record: Record, alone: Record) -> Finding | None:
    """Returns the finding for a step at which the ranks' models get other rows than that of one process.

    Its gradient must be another one, from the same parameters. The order of the samples may be another one, too: so
    either some of the rows are those of one process in each of the first steps, and others never come up there; or both
    get the same rows again and again, and what they get in one such period, or at all, differs.
    """
    found = own_pace.parting(record, alone, record.kept_steps)
    if found is None or _draw_apart(record, found.step["window"]):
        return None
    mine, theirs = _counts(record.data.ranks), _counts(alone.ranks[:1])
    windows = [window for window in mine if window in theirs]
    if any(mine[window].total() != theirs[window].total() for window in windows[:_FIRST]):
        return None
    ours = mine.get(found.step["window"], Counter())
    whole = theirs.get(found.other["window"], Counter())
    if (period := _period(mine)) is not None and period == _period(theirs):
        ours = sum((mine[one] for one in windows[:period]), Counter())
        whole = sum((theirs[one] for one in windows[:period]), Counter())
        left_out = 0 if period == 1 else max(mine[one].total() for one in windows[:period])  # by drop_last, at most
        is_other = (ours - whole).total() > max(record.size, left_out, _BY_CHANCE * ours.total())
    else:
        seen = {row for rows in theirs.values() for row in rows}
        foreign = sum(count for row, count in (ours - whole).items() if row not in seen)
        window = found.step["window"]
        is_drawn = own_data.draw_otherwise(record, alone, window)
        if _are_all_seen(mine) and _are_all_seen(theirs) and not is_drawn and _are_as_long(record, alone, window):
            is_other = foreign > max(record.size, _BY_CHANCE * ours.total())
            return _others(record, found.step, ours, whole) if is_other else None
        shares = [(mine[one] & theirs[one]).total() / max(mine[one].total(), 1) for one in windows[:_FIRST]]
        is_other = len(shares) == _FIRST and min(shares) >= _ALIKE and _are_samples(record)
        is_other = is_other and foreign > max(record.size, _BY_CHANCE * ours.total())
    return _others(record, found.step, ours, whole) if is_other else None


def _others(record: Record, step: Event, ours: Counter[str], whole: Counter[str]) -> Finding:
    return Finding(
        code="batches-differ",
        step=step["event"],
        where=record.ranks[0].backward_of(step),
        cause=f"{(ours - whole).total():,} of the {ours.total():,} rows that the ranks' models get are not among those "
        f"of one process, and from the same parameters the gradient of step {step['event']} differs: what makes the "
        "samples depends on the part of the data that a rank has",
        fix="compute what samples are made with (a vocabulary, statistics, weights, negatives) from all data, or over "
        "all ranks, and divide the samples after that",
    )


def _draw_apart(record: Record, window: int) -> bool:
    """Whether the ranks draw other numbers at some line in a window."""
    drawn: dict[str, set[str]] = {}
    for rank in record.data.ranks:
        for draw in rank.of("draw"):
            if place_of_draw(draw)[0] == window:
                drawn.setdefault(draw["place"], set()).add(draw["digest"])
    return any(len(digests) > 1 for digests in drawn.values())


def _counts(ranks: Sequence[Rank]) -> dict[int, Counter[str]]:
    """Window -> how often the models of these ranks get each row in it."""
    return {
        window: Counter(row for rank in ranks for rows in calls_in(rank, window) for row in rows)
        for window in _by_step(ranks)
    }


def _period(counts: dict[int, Counter[str]]) -> int | None:
    """After how many steps the same rows come again, at all steps; None where that is not seen twice."""
    steps = list(counts.values())
    for period in range(1, len(steps) // 2 + 1):
        if all(one == other for one, other in zip(steps, steps[period:], strict=False)):
            return period
    return None


def _are_all_seen(counts: dict[int, Counter[str]]) -> bool:
    """Whether all rows of the second half of the steps have come up in the first: there are no others."""
    steps = list(counts.values())
    first = {row for rows in steps[: len(steps) // 2] for row in rows}
    return len(steps) > 1 and all(row in first for rows in steps[len(steps) // 2 :] for row in rows)


def _are_as_long(record: Record, alone: Record, window: int) -> bool:
    """Whether the rows of a step have as many numbers as those of one process: no rank has half of each row."""
    mine, theirs = (
        sum(
            number
            for rank in ranks
            for number in {tuple(one["rows"]): one["numbers"] for one in rank.in_window(window, "input")}.values()
        )
        for ranks in (record.data.ranks, alone.ranks[:1])
    )
    return bool(mine == theirs)


def _are_samples(record: Record) -> bool:
    """Whether rows are samples: the models get few of them twice in a call. Tokens come again and again."""
    calls = [rows for rank in record.data.ranks for rows in _calls(rank)]
    return sum(len(set(rows)) for rows in calls) >= _DISTINCT * sum(map(len, calls))


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
    """The rows that a rank's models get before one comes again; none where that is not seen, or at once.

    Rows that come at every step, such as anchors beside the samples, are none.
    """
    steps = [*_by_step([rank]).values()]
    constant = set.intersection(*steps) if steps else set()
    constant = constant if all(constant < rows for rows in steps) else set()  # else there are no others
    seen: set[str] = set()
    for call in _calls(rank):
        samples = set(call) - constant
        if seen & samples:
            return seen
        seen |= samples
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
