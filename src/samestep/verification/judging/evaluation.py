"""Whether an evaluation is that of one process: every sample once, buffers alike, and sums that come to the same.

counts      all_reduce([correct, seen])           N ranks and one process have the same sums
means       all_reduce(accuracy of a rank) ÷ N    their mean is the one-process value only where parts are alike
gathered    all_gather(predictions)               as many rows as samples
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from samestep.verification.findings import AGREES, PROVED, REFUTED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.printed import Difference, metrics_alike
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.samples import Pass, fills_up, loads_for_all, mean_the_same, passes
from samestep.verification.judging.states import differing
from samestep.verification.judging.words import listed, plural
from samestep.verification.report import Report

__all__: list[str] = []

_CLOSE = 1e-4  # of a sum; the parameters are the same, so this is rounding

Values = dict[tuple[int, str, int], Event]


def judge(record: Record, alone: Record | None, report: Report) -> None:
    """Adds what evaluations tell; `alone` is the script run alone, if it ran."""
    _judge_buffers(record, report)
    out_of_step = alone is not None and any(rank.of("out_of_step") for rank in alone.ranks)
    if REFUTED in {report.coverage.get(name) for name in ("initial_state", "parameters", "parameter_order")}:
        alone = None  # the ranks evaluate different models
    elif out_of_step and loads_for_all(record) is not None:
        alone = None  # it evaluates other weights
    alone = None if alone is None or not alone.ranks else _placed(alone)
    compared = list(_metrics(record, alone))
    report.add([finding for finding in compared if finding is not None][:1])
    if not any(rank.of("evaluated") for rank in record.ranks):
        if any(rank.of("metrics") for rank in record.ranks):
            why = "the script did not run alone" if alone is None else "no number of it could be compared"
            report.cover("evaluation", AGREES if compared else unchecked(why))
            return
        report.cover("evaluation", unchecked("none was reached in the steps that were recorded; see --steps"))
        return
    mine = _brought(record)
    theirs = _brought(alone) if alone is not None else {}
    common = [place for place in mine if place in theirs and mine[place]["last"] and theirs[place]["last"]]
    found = list(_different(record, mine, theirs, common))
    printed = None if alone is None else metrics_alike(record.ranks[0], alone.ranks[0])
    sampled = list(_samples(record))
    if not found and printed is not None and printed.different is not None:
        found = [_printed(printed.different, record)]
    confirmed = _is_right_all_the_same(mine, theirs, common) or (printed is not None and printed.alike)
    if not found and sampled and not confirmed:
        found = sampled
    report.add(found[:1])
    report.add(_tails(record) if not found else [])
    unseen = _unseen(record)
    report.cover("evaluation", AGREES if confirmed else PROVED if unseen is None else unchecked(unseen))


def _printed(difference: Difference, record: Record) -> Finding:
    gathers = [event["where"] for event in record.ranks[0].of("collected") if "rows" in event]
    return Finding(
        code="evaluation-inexact",
        property="evaluation",
        where=gathers[-1] if gathers else difference.where,
        cause=f"with the same weights the ranks come to {difference.name} {difference.mine}, one process to "
        f"{difference.theirs}",
        fix="bring predictions and labels of all ranks into one order, every sample once; samestep.evaluate(…) does",
    )


def _tails(record: Record) -> Iterator[Finding]:
    """Evaluations whose loader leaves the last samples out, on every rank."""
    told = record.ranks[0].of("evaluated")
    evaluated = {(event["key"], event["number"]): event["phase"] for event in told}
    loaders = {phase: {event["key"] for event in told if event["phase"] == phase} for phase in evaluated.values()}
    mine = [{(one.about["key"], one.about["number"]): one for one in passes(rank)} for rank in record.ranks]
    for name, one in mine[0].items():
        phase = evaluated.get(name)
        if phase is None or len(loaders[phase]) > 1 or one.is_training or not one.about["drop_last"]:
            continue  # another loader of the same evaluation may bring the rest
        group = [theirs[name] for theirs in mine if name in theirs]
        size, known = one.about["samples"], all(each.complete and each.indices is not None for each in group)
        missing = size - len({index for each in group for index in each.indices or ()}) if size and known else 0
        if missing > 0:
            yield Finding(
                code="evaluation-inexact",
                property="evaluation",
                where=one.about["key"].rpartition("#")[0],
                cause=f"{missing} of {plural(size, 'sample')} are in no batch: drop_last",
                fix="drop_last=False for evaluation",
            )
            return


def _placed(alone: Record) -> Record:
    """What the script alone evaluates with the recorded weights; steps of its own bring it to others, by rounding."""
    ranks = [Rank(rank.number, [one for one in rank.events if one.get("placed", True)]) for rank in alone.ranks]
    return Record(alone.folder, ranks)


def _metrics(record: Record, alone: Record | None) -> Iterator[Finding | None]:
    """What samestep.evaluate has returned, on the ranks and alone, from the same weights; None where it agrees."""
    theirs = {} if alone is None else _returned(alone)
    for place, here in _returned(record).items():
        for name in here["metrics"].keys() & theirs.get(place, {"metrics": {}})["metrics"].keys():
            mine, other = here["metrics"][name], theirs[place]["metrics"][name]
            yield None if _close(mine, other) else _inexact(here["where"], mine, other, 1)


def _returned(record: Record) -> Values:
    """(window, line, how many there before) -> what samestep.evaluate has returned."""
    seen: Counter[tuple[int, str]] = Counter()
    returned: Values = {}
    for event in record.ranks[0].of("metrics"):
        place = (event["window"], event["where"])
        returned[(*place, seen[place])] = event
        seen[place] += 1
    return returned


def _judge_buffers(record: Record, report: Report) -> None:
    told = [
        {(event["key"], event["number"]): event["digests"] for event in rank.of("buffers")} for rank in record.ranks
    ]
    for rank, theirs in enumerate(told[1:], 1):
        for place, digests in theirs.items():
            if place in told[0] and (bad := differing(told[0][place], digests)):
                report.add([_buffers(record, rank, place[0], bad)])
                return
    if any(told):
        report.cover("buffers", PROVED)


def _buffers(record: Record, rank: int, key: str, bad: list[str]) -> Finding:
    return Finding(
        code="buffers-diverged",
        property="buffers",
        rank=record.ranks[rank].number,
        tensor=bad[0],
        where=key.rpartition("#")[0],
        cause=f"rank {record.ranks[rank].number} evaluates with other values than rank 0 in {listed(bad, 'buffer')}: "
        "each rank has the statistics of its own batches",
        fix="broadcast the buffers from rank 0 before an evaluation, evaluate through the wrapped model, or use "
        "synchronised BatchNorm",
    )


def _brought(record: Record) -> Values:
    """(phase, line, number there) -> what rank 0's collective brought; "last" if nothing was evaluated after it."""
    seen: Counter[tuple[int, str]] = Counter()
    brought: Values = {}
    for index, event in enumerate(told := record.ranks[0].of("collected", "evaluated")):
        if event["kind"] == "collected":
            place = (event["phase"], event["where"])
            seen[place] += 1
            after = (one for one in told[index:] if one["kind"] == "evaluated" and one["phase"] == event["phase"])
            brought[(*place, seen[place])] = event | {"last": next(after, None) is None}
    return brought


def _different(record: Record, mine: Values, theirs: Values, common: list[tuple[int, str, int]]) -> Iterator[Finding]:
    for place in common:
        here, there = mine[place], theirs[place]
        if "values" in here and "values" in there:
            pairs = list(zip(here["values"], there["values"], strict=False))
            bad = next((pair for pair in pairs if not _agree(*pair, record.size, here["reduce"])), None)
            if bad is not None:
                yield _inexact(place[1], *bad, record.size)


def _agree(mine: float, theirs: float, size: int, reduce: str | None) -> bool:
    """Whether N ranks bring what one brings: the same, or N times as much where it is divided by N afterwards."""
    summed = reduce in {None, "SUM"}
    return _close(mine, theirs) or (summed and _close(mine / size, theirs))


def _close(mine: float, theirs: float) -> bool:
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return mine == theirs or (math.isnan(mine) and math.isnan(theirs))
    return abs(mine - theirs) <= _CLOSE * max(abs(mine), abs(theirs), 1e-12)


def _inexact(where: str, mine: float, theirs: float, size: int) -> Finding:
    whole = mine.is_integer() and theirs.is_integer()  # infinities and NaN are none
    what = (
        f"the ranks sum up {mine:g} where one process counts {theirs:g}"
        if whole
        else f"the ranks bring {mine / size:.6g} (or {mine:.6g} before a division by {size}), one process {theirs:.6g}"
    )
    return Finding(
        code="evaluation-inexact",
        property="evaluation",
        where=where,
        cause=f"with the same weights {what}: samples are counted twice or left out, or means of unlike parts are "
        "averaged",
        fix="all_reduce the sum and the count over an evaluation set without padding, and divide once; "
        "samestep.evaluate(…) does",
    )


def _splits(record: Record) -> Iterator[list[Pass]]:
    """Yields the passes of evaluations whose samples the ranks have split between them, one list for each."""
    evaluated = {(event["key"], event["number"]) for rank in record.ranks for event in rank.of("evaluated")}
    mine = [{(one.about["key"], one.about["number"]): one for one in passes(rank)} for rank in record.ranks]
    for name in sorted(evaluated):
        group = [theirs[name] for theirs in mine if name in theirs]
        if len(group) < record.size or not all(one.complete for one in group) or not mean_the_same(group, record):
            continue
        parts = [set(one.indices or []) for one in group]
        whole = all(len(part) == one.about["samples"] for part, one in zip(parts, group, strict=True))
        if not whole and not (group[0].about["drop_last"] and all(part == parts[0] for part in parts)):
            yield group  # else each evaluates all it has, but for a tail


def _samples(record: Record) -> Iterator[Finding]:
    """Such passes with samples too many or too few."""
    for group in _splits(record):
        if _filled_and_gathered(group, record) is None:
            yield from _split(group)


def _unseen(record: Record) -> str | None:
    """Why nobody can say what an evaluation comes to."""
    return next(filter(None, (_filled_and_gathered(group, record) for group in _splits(record))), None)


def _filled_and_gathered(group: list[Pass], record: Record) -> str | None:
    """Of samples that a library brings twice to fill last batches up: what it gathers, it may take out again.

    accelerate's gather_for_metrics does, and its gather does not: the collective is the same.
    """
    name = group[0].about["key"], group[0].about["number"]
    phases = {event["phase"] for event in record.ranks[0].of("evaluated") if (event["key"], event["number"]) == name}
    gathers = any("rows" in event for event in record.ranks[0].of("collected") if event["phase"] in phases)
    if group[0].about.get("cut_by") is None or not gathers or not fills_up(group):
        return None
    extra = sum(len(one.indices or []) for one in group) - group[0].about["samples"]
    what = "sample comes" if extra == 1 else "samples come"
    return (
        f"{extra} {what} twice, since {group[0].about['cut_by']} fills the ranks' last batches up, and whether what is "
        "gathered keeps them was not seen"
    )


def _split(group: list[Pass]) -> Iterator[Finding]:
    size = group[0].about["samples"]
    if size is None:
        return
    counts = Counter(index for one in group for index in one.indices or [])
    extra, missing = sum(counts.values()) - len(counts), size - len(counts)
    if extra or missing:
        what = [f"{plural(extra, 'sample')} twice"] if extra else []
        what += [f"{plural(missing, 'sample')} never"] if missing else []
        yield Finding(
            code="evaluation-inexact",
            property="evaluation",
            where=group[0].about["key"].rpartition("#")[0],
            cause=f"the ranks together evaluate {' and '.join(what)}, of {size}",
            fix="evaluate range(rank, len(dataset), world_size) without padding, or samestep.evaluate(…)",
        )


def _is_right_all_the_same(mine: Values, theirs: Values, common: list[tuple[int, str, int]]) -> bool:
    """Whether counts were compared and agree: padding was taken out again."""
    return any("values" in mine[place] and "values" in theirs[place] for place in common)
