"""Whether the ranks are replicas: the same parameters before and after every step, and the same gradients at it.

What differs later only follows from what differed first, so the first difference is the finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from samestep.text import listed, plural
from samestep.verification.findings import AGREES, PROVED, Finding, unchecked
from samestep.verification.journal import Event, place_of
from samestep.verification.judging.causes import JOIN, NO_GROUP, OUTSIDE, diverged, of_gradients, of_parameters
from samestep.verification.judging.record import BY_THEMSELVES, Rank, Record, Run, beside_first
from samestep.verification.recording.optimizers import UNNAMED
from samestep.verification.report import Report

_PART = "each rank holds a part of the model, cut by the script itself"
_SOON = 16  # steps within which ranks that step by themselves average their parameters
_ONE_COPY = "each rank holds parts, and of a part there is one copy"  # or copies that agree, with replicated groups


def judge(record: Record, report: Report, own_pace: Callable[[], Record] | None = None) -> None:
    """Adds what the states of the ranks tell; `own_pace` records one process at its own pace."""
    if record.steps == 0:
        for name in ("initial_state", "gradients", "parameters"):
            report.cover(name, unchecked("no optimizer step was seen"))
        report.add(_unequal_copies(record))
        return
    order = list(orders(record))
    report.add(order)
    report.cover("parameter_order", PROVED)
    if any(finding.severity == "error" for finding in order):
        return
    report.add(_initial(record))
    copies, margin = (AGREES, _ONE_COPY) if record.is_cut else (PROVED, None)
    report.cover("initial_state", copies, margin)
    found = next(_first_difference(record), None)
    if found is not None and not report.errors:
        report.add([found])
    report.cover("parameters", copies if record.steps > 1 or found is None else AGREES, margin)
    if (declared := local_steps(record)) is not None:
        why = f"ranks step by themselves, as {declared['how']} declares"
        report.cover("gradients", unchecked(why))
        report.cover("parameters", copies, f"{why}: alike before the first step and behind every average")
    _stale(record, report, own_pace)
    report.add(_undone(record, own_pace))


def _unequal_copies(record: Record) -> Iterator[Finding]:
    """Whether models that a wrapper keeps alike have other values on some rank, where no step is seen."""
    for index, events in enumerate(zip(*(rank.of("replicas") for rank in record.ranks), strict=False)):
        if (bad := differing_ranks(list(events), "parameters")) is not None:
            first, other = record.ranks[0].number, record.ranks[bad[0]].number
            when = f"before backward pass {index}"
            yield diverged(first, other, max(index - 1, 0), bad[1], when, OUTSIDE, events[0]["where"])
            return


def _undone(record: Record, own_pace: Callable[[], Record] | None) -> Iterator[Finding]:
    """Whether what a rank has made of its own parameters is lost, where each rank's optimizer holds others.

    One process may put a parameter back, too: one that is clamped, say.
    """
    single = all(len({step["optimizer"] for step in rank.steps}) == 1 for rank in record.ranks)  # one inside another?
    for rank in [] if record.is_alike or not single else record.ranks:
        for step, following in pairwise(rank.steps[: record.steps]):
            lost = _put_back(step, following)
            alone = own_pace().ranks[:1] if lost and own_pace is not None else []
            kept = {name for one in alone for pair in pairwise(one.steps) for name in _put_back(*pair)}
            if lost and not kept.issuperset(lost):
                yield Finding(
                    code="parameters-diverged",
                    rank=rank.number,
                    step=step["event"],
                    tensor=lost[0],
                    where=step["where"],
                    cause=f"the optimizer of rank {rank.number} alone steps {listed(lost)}, and before the next step "
                    "they are what they were: another rank's values were written over them",
                    fix="send each parameter from the rank whose optimizer holds it: dist.broadcast(p, src=owner)",
                )
                return


def _put_back(step: Event, following: Event) -> list[str]:
    """The parameters that a step changes, and that are what they were before it when the next one begins."""
    before, after, then = step["parameters"], step["after"] or {}, following["parameters"]
    return [name for name in after if after[name] != before.get(name) == then.get(name)]


def foreign_to(record: Record) -> str | None:
    """Names the way in which parameters are cut, where it is one that no judge understands."""
    unknown = [event["unknown"] for rank in record.ranks for event in rank.of("wrap") if event.get("unknown")]
    if unknown:
        return str(unknown[0])
    if staged(record) is not None or scheduled(record):
        return "the ranks hold stages of one model"
    steps = zip(*(rank.steps for rank in record.ranks), strict=False)
    if record.by_themselves and any(len({one["optimizer"] for one in events}) > 1 for events in steps):
        return BY_THEMSELVES
    return None


def by_hand(record: Record, whole: Run) -> str | None:
    """Says why the ranks are no replicas of one model; None where they may be.

    What DistributedDataParallel holds is declared to be replicated, but for what it is told to ignore, and where one
    process has parameters that a rank lacks. For the rest the script alone tells: it has the parameters that each rank
    has, or each rank has a part of a model (tensor, pipeline or expert parallelism by hand).
    """
    if not record.steps or any(rank.of("called") for rank in record.ranks):
        return None
    shapes = [_shapes(rank) for rank in record.ranks]
    alone = _shapes(whole.rank)
    if record.is_cut:  # by torch, but for what the script cuts beside that
        plain = [
            {name for start in rank.of("start") for name, one in start["parameters"].items() if not place_of(one)}
            for rank in record.ranks
        ]
        pairs = zip(plain, shapes, strict=True)
        other = {one for own, mine in pairs for one in own & mine.keys() & alone.keys() if mine[one] != alone[one]}
        return _PART if other else None
    if not alone:
        apart = any(mine != shapes[0] for mine in shapes) or next(_initial(record), None) is not None
        why = "the ranks hold different parameters, and the script does not run alone"
        return why if apart and not record.wrappers else None
    held = [{name for step in rank.steps for name in step["parameters"]} for rank in record.ranks]
    if not all(alone.keys() <= names | mine.keys() for names, mine in zip(held, shapes, strict=True)):
        return _PART
    if _are_crossed(record, whole):
        return _PART
    ignored = {name for event in record.ranks[0].of("wrap") for name in event.get("ignored", [])}
    copied = {name for event in record.ranks[0].of("wrap") for name in event["names"]} - ignored
    if any(name not in copied for mine in shapes for name, _ in mine.items() - alone.items()):
        return _PART
    own = [name for name in _own(record) if name in ignored or not record.wrappers]
    own += sorted(ignored & _differing_later(record) - {*own})
    if own and all(mine == alone for mine in shapes):
        return f"each rank has {listed(own)} for itself, and nothing declares that they are copies"
    return None


def _shapes(rank: Rank) -> dict[str, str]:
    return {
        name: str(shape)
        for event in rank.of("names")
        for name, shape in zip(event["names"], event["shapes"], strict=True)
    }


def _are_crossed(record: Record, whole: Run) -> bool:
    """Whether one process has two models of one kind, of which each rank has parts, together one.

    Stages that run in both directions, say: all optimizers of a rank together have every name.
    """
    several = {name for name, times in _times_held(whole.rank).items() if times > 1}
    return bool(several) and all(_times_held(rank)[name] == 1 for rank in record.ranks for name in several)


def _times_held(rank: Rank) -> Counter[str]:
    """Name -> how many optimizers hold a parameter of it."""
    held = {(event["optimizer"], name) for event in rank.of("names") for name in event["names"]}
    return Counter(name for _, name in held)


def _own(record: Record) -> list[str]:
    """The parameters that differ from the start and whose gradients never agree, where those of others do."""
    starts = [start["parameters"] for start in record.first_of("start") if start is not None]
    apart = {name for other in starts[1:] for name in differing(starts[0], other)}
    for index in range(record.steps):
        events = record.events_of_step(index)
        apart &= {name for event in events[1:] for name in differing(events[0]["gradients"], event["gradients"])}
    return sorted(apart) if starts and len(apart) < len(starts[0]) else []


def _differing_later(record: Record) -> set[str]:
    """The parameters that are not alike on all ranks before some step, where others are before every step."""
    steps = [record.events_of_step(index) for index in range(record.steps)]
    apart = {
        name
        for events in steps
        for other in events[1:]
        for name in differing(events[0]["parameters"], other["parameters"])
    }
    return apart if any(name not in apart for events in steps for name in events[0]["parameters"]) else set()


def staged(record: Record) -> Event | None:
    """Returns what the first rank recorded of its pipeline, where that has several stages."""
    return next((event for rank in record.ranks[:1] for event in rank.of("staged") if event["stages"] > 1), None)


def several(record: Record) -> Event | None:
    """Returns what the first rank recorded of a pipeline whose stages each process holds, on devices of its own."""
    pipelines = [event for rank in record.ranks[:1] for event in rank.of("staged")]
    return next((event for event in pipelines if event["stages"] == 1 and event["held"] > 1), None)


def scheduled(record: Record) -> list[tuple[int, Event]]:
    """Returns what ranks recorded of steps of torch.distributed.pipelining, each with its rank."""
    return [(rank.number, event) for rank in record.ranks for event in rank.of("scheduled")]


def orders(record: Record) -> Iterator[Finding]:
    """Yields the first of the ranks' models or optimizers that have their parameters in different orders."""
    for kind in ("wrap", "names"):
        names = [dict(enumerate(event["names"] for event in rank.of(kind))) for rank in record.ranks]
        for rank, number, first, other in beside_first(names):
            if first != other and (kind == "wrap" or sorted(first) == sorted(other)):
                yield _order(record, kind, number, record.ranks[rank], first, other)
                return


def _differ_by_name(record: Record) -> bool:
    """Whether gradients, or parameters behind a step, of one name are not alike on all ranks."""
    return any(
        differing_ranks(events, key) is not None
        for events in map(record.events_of_step, range(record.steps))
        for key in ("gradients", "after")
        if all(event[key] is not None for event in events)
    )


def _order(record: Record, kind: str, number: int, rank: Rank, first: list[str], other: list[str]) -> Finding:
    at = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), 0)
    here, there = (names[at] if at < len(names) else "nothing" for names in (first, other))
    if kind == "wrap":
        wrap = rank.of("wrap")[number]
        what, where = "registers", _made(wrap, there)[0] or wrap["where"]
    else:
        what, where = "gives its optimizer", next((one["where"] for one in rank.of("optimizer")[number:]), None)
    return Finding(
        code="parameter-order-differs",
        severity="error" if kind == "wrap" or _differ_by_name(record) else "note",
        rank=rank.number,
        tensor=there,
        where=where,
        cause=f"rank {rank.number} {what} {there} where rank 0 has {here} (parameter {at}): the ranks average, and "
        "broadcast, one tensor into another",
        fix="register parameters in one order on all ranks: iterate over a list or sorted(...), not over a set",
    )


def _initial(record: Record) -> Iterator[Finding]:
    starts = {place: start for place, start in enumerate(record.first_of("start")) if start is not None}
    bad = differing_ranks(list(starts.values()), "parameters")
    # made equal before the first step: gradients tell whether that was early enough
    are_equal = record.steps > 0 and differing_ranks(record.events_of_step(0), "parameters") is None
    if 0 in starts and bad is not None and not are_equal:
        yield unequal_start(record, [*starts][bad[0]], bad[1])


def unequal_start(record: Record, rank: int, names: list[str], when: str = "before the first step") -> Finding:
    """Returns the finding for parameters that differ from the start, on the rank of that place."""
    first, other = record.ranks[0], record.ranks[rank]
    return Finding(
        code="initial-state-differs",
        rank=other.number,
        step=0,
        tensor=names[0],
        where=built_at([] if other.of("wrap") else other.of("names"), names[0]) or made(other.events),
        cause=f"{when} rank {other.number} has other values than rank {first.number} in {listed(names)}"
        + (f"; {NO_GROUP}" if record.has_no_group else ""),
        fix=_initial_fix(record),
    )


def _initial_fix(record: Record) -> str:
    if record.has_no_group:
        return JOIN
    if "FullyShardedDataParallel" in record.wrappers:
        wrapped = "FullyShardedDataParallel(model, sync_module_states=True)"
        return f"{wrapped}, which sends rank 0's to all, and no change later"
    if record.ranks[0].of("wrap"):
        return "load or change weights before DistributedDataParallel(model), which sends rank 0's to all; not after it"
    return "for p in model.parameters(): dist.broadcast(p.data, src=0)    # once, before the first step"


def built_at(events: Sequence[Event], name: str) -> str | None:
    """Returns the line that builds the model of a parameter, where one of these events tells it."""
    return next((whole for event in events if (whole := _made(event, name)[1])), None)


def _made(event: Event, name: str) -> tuple[str, str]:
    """The lines that make the module of a parameter, and the model that it is a part of; empty if not known."""
    lines: dict[str, tuple[str, str]] = dict(zip(event["names"], event.get("made", []), strict=False))
    return lines.get(name, ("", ""))


def made(events: Sequence[Event]) -> str | None:
    """Returns where a rank wraps its first model, or makes its first optimizer."""
    return next((event["where"] for event in events if event["kind"] in {"wrap", "optimizer"}), None)


def local_steps(record: Record) -> Event | None:
    """Returns what declares that ranks step by themselves, if anything does."""
    return next(iter(record.ranks[0].of("local_steps")), None) if record.ranks else None


def averaged_behind(record: Record) -> int | None:
    """Returns the first step that ranks take with gradients of their own, and after which their parameters agree."""
    if local_steps(record) is not None:
        return None
    for index in range(record.steps):
        apart = differing_ranks(record.events_of_step(index), "gradients") is not None
        apart = apart and record.ranks[0].steps[index]["optimizer"] not in record.by_themselves
        if apart and not record.averages_within(record.ranks[0].steps[index]) and _healed(record, index):
            return index
    return None


def evaluates_apart(record: Record) -> bool:
    """Returns whether an evaluation runs while ranks that step by themselves have parameters of their own."""
    events = _apart(record, "evaluated") if local_steps(record) is not None else ()
    return any(apart and event["kind"] == "evaluated" for event, apart in events)


def _apart(record: Record, *kinds: str) -> Iterator[tuple[Event, int]]:
    """Yields the first rank's steps, and its other events of some kinds, with how many steps ranks have been apart.

    They are alike at first, behind every average, and as long as they have the same gradients.
    """
    apart, index = 0, 0
    for event in record.ranks[0].of("average", "step", *kinds):
        if event["kind"] == "average":
            apart = 0
            continue
        yield event, apart
        if event["kind"] == "step" and index < record.steps:
            apart += bool(apart) or differing_ranks(record.events_of_step(index), "gradients") is not None
            index += 1


def _first_difference(record: Record) -> Iterator[Finding]:
    if (declared := local_steps(record)) is not None:
        yield from _first_unaveraged(record, declared)
        return
    averaged, apart = averaged_behind(record), False
    soon = 1 if record.wrappers else _SOON
    for index in range(record.steps):
        events = record.events_of_step(index)
        if events[0]["optimizer"] in record.by_themselves:
            continue
        bad = differing_ranks(events, "parameters")
        apart = apart and bad is not None
        if bad is not None and not apart:
            yield of_parameters(record, index, *bad)
            return
        bad = differing_ranks(events, "gradients")
        if bad is not None and not apart and not _healed(record, index):
            is_last = 0 < index == record.steps - 1
            is_sent_later = is_last and record.averages_within(record.ranks[0].steps[index - 1])
            if is_sent_later or (averaged is not None and averaged < index and index + soon >= record.steps):
                return  # what would be averaged behind the last steps was not recorded
            yield of_gradients(record, index, *bad)
            return
        apart = apart or (bad is not None and not healed_at_once(record, index))
    if apart:
        return
    last = record.events_of_step(record.steps - 1)
    if all(event["after"] is not None for event in last) and (bad := differing_ranks(last, "after")):
        yield of_parameters(record, record.steps, *bad)


def _first_unaveraged(record: Record, declared: Event) -> Iterator[Finding]:
    """The first step before which ranks differ that should be alike, or that have not been averaged for too long."""
    before = 0
    for index, (_, apart) in enumerate([*_apart(record)][: record.steps]):
        bad = None if 0 < apart <= declared["every"] else differing_ranks(record.events_of_step(index), "parameters")
        if bad is not None:
            found = of_parameters(record, index, *bad)
            yield _unaveraged(found, declared, apart, bad[1]) if index and (apart or before) else found
            return
        before = apart + (differing_ranks(record.events_of_step(index), "gradients") is not None)


def _unaveraged(found: Finding, declared: Event, apart: int, bad: list[str]) -> Finding:
    cause = f"after step {found.step} rank {found.rank} has other values than rank 0 in {listed(bad)}"
    if apart:
        cause += f": {declared['how']} declares an average of all ranks, and in {plural(apart, 'step')} there was none"
        fix = "call what averages after every step of the optimizer: local_sgd.step(), averager.average_parameters(…)"
        return replace(found, where=declared["where"], cause=cause, fix=fix)
    return replace(found, cause=f"{cause}, though parameters were averaged: the average leaves them out on some rank")


def differing_ranks(events: list[Event], key: str) -> tuple[int, list[str]] | None:
    """Returns the first rank that differs from rank 0, and in which tensors.

    A part is compared with that of the first rank that has the same one.
    """
    known: dict[tuple[str, str], str] = {}
    for rank, event in enumerate(events):
        digests = {(name, place_of(digest)): digest for name, digest in event[key].items()}
        if bad := [name for (name, place), digest in digests.items() if known.get((name, place), digest) != digest]:
            return rank, bad
        known = digests | known
    return None


def _healed(record: Record, index: int) -> bool:
    """Whether the parameters agree again before a later step: local steps, whose parameters are averaged.

    Where nothing declares that the ranks are copies, they may be averaged every few steps only. What is loaded makes
    parameters equal as well, and is no average.
    """
    if healed_at_once(record, index):
        return True
    if record.wrappers:
        return False
    for later in range(index + 1, record.steps):
        if differing_ranks(record.events_of_step(later), "parameters") is None:
            return not any(index < one["event"] <= later for rank in record.ranks for one in rank.of("weights", "load"))
    return False


def healed_at_once(record: Record, index: int) -> bool:
    """Returns whether parameters agree before the next step, or within this one."""
    step, following = record.ranks[0].steps[index], index + 1
    if record.averages_within(step):
        return differing_ranks(record.events_of_step(index), "after") is None
    return following < record.steps and differing_ranks(record.events_of_step(following), "parameters") is None


def differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns the names that both have, with other values."""
    return [name for name, value in first.items() if name in other and other[name] != value]


def _stale(record: Record, report: Report, own_pace: Callable[[], Record] | None) -> None:
    """Whether the optimizer holds the parameters that the loss depends on."""
    early = [event for event in record.ranks[0].steps if event["window"] <= 1]
    if not early or not record.is_alike:
        return
    event = early[-1]  # where several optimizers take turns, all have been made by then
    stepped = _stepped_by_hand(record.ranks[0])
    orphans, left_out = ([name for name in event[key] if name not in stepped] for key in ("orphans", "left_out"))
    idle = [name for name, digest in event["gradients"].items() if digest is None]
    are_gone = any(name.startswith(UNNAMED) for name in idle)  # no model has them
    if (left_out and are_gone) or (orphans and len(idle) == len(event["gradients"])):
        cause = (
            f"{plural(len(idle), 'parameter')} of the optimizer never get a gradient, and "
            f"{listed(orphans, 'parameter')} of the model get one and are in no optimizer: it was made from "
            "parameters that the model no longer has"
        )
        report.add([_missed(record, event, orphans, cause)])
    elif left_out:
        cause = f"{listed(left_out, 'parameter')} get gradients and are in no optimizer, unlike the rest"
        is_empty = event["empty_groups"] and not _is_empty_alone(event, own_pace)
        is_meant = not is_empty and not _are_held_alone(left_out, own_pace)
        found = _missed(record, event, left_out, cause)
        report.add([replace(found, severity="note", fix=None) if is_meant else found])


def _is_empty_alone(event: Event, own_pace: Callable[[], Record] | None) -> bool:
    """Whether an optimizer of one process has as many empty groups, and leaves the same parameters out."""
    ranks = [] if own_pace is None else own_pace().ranks
    steps = [step for rank in ranks for step in rank.steps if step["event"] == event["event"]]
    return any(all(step[key] == event[key] for key in ("empty_groups", "left_out")) for step in steps)


def _are_held_alone(names: list[str], own_pace: Callable[[], Record] | None) -> bool:
    """Whether an optimizer of one process holds parameters that none of a rank does."""
    ranks = [] if own_pace is None else own_pace().ranks
    held = {name.rpartition(": ")[2] for rank in ranks for one in rank.of("names") for name in one["names"]}
    return any(name in held for name in names)


def _stepped_by_hand(rank: Rank) -> set[str]:
    """The parameters that change from step to step: one of no optimizer is stepped by the script's own code."""
    known: dict[str, str] = {}
    changed = set()
    for step in rank.steps:
        for name, digest in step["parameters"].items():
            if known.setdefault(name, digest) != digest:
                changed.add(name)
    return changed


def _missed(record: Record, event: Event, names: list[str], cause: str) -> Finding:
    made = [one for one in record.ranks[0].of("optimizer") if one["number"] == event["optimizer"]]
    return Finding(
        code="optimizer-misses-parameters",
        step=event["event"],
        tensor=names[0],
        where=made[0]["where"] if made and made[0]["where"] else event["where"],
        cause=cause,
        fix="make the optimizer last, from all parameters that train; requires_grad_(False) for those that do not",
    )
