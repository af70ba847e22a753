"""Whether one process at its own pace, with samples and draws of its own, steps with the ranks' gradients.

Where an optimizer keeps gradients to itself, or averages them while it steps, its steps are compared instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, Finding
from samestep.verification.journal import Event
from samestep.verification.judging import rates
from samestep.verification.judging.record import Record, calls_in, place_of_draw
from samestep.verification.report import Report

CARRIED_APART = (
    "Something beside the parameters has come apart: statistics that each rank gathers by itself, say, or the samples "
    "that it goes on with"
)
_FEWEST = 2  # steps: the second one shows what the first has made
_MANY = 8  # steps, where the end of the training is not reached
_FIRST = 3  # steps: rounding makes more of later ones
_NEAR = 1e-3  # of a norm
_SMALL = 1e-2  # of the whole gradient's norm: smaller gradients are held against this
_FAR = 1e-2  # of the gradients' norm; what rounding has made of the first steps is less


def judge(record: Record, alone: Record, steps: list[Event], report: Report) -> None:
    """Adds that the gradients of these steps, whose values were kept, are those of one process, or are so no more."""
    worst = worst_error(record, alone, steps)
    if worst is None:
        report.add(() if record.is_averaged_within else parted(record, alone, steps))
    else:
        compared = plural(len([*_pairs(alone, steps)]), "step")
        report.cover("gradients", AGREES, f"worst error {worst:.1e}, {compared} of one process at its own pace")


def worst_error(record: Record, alone: Record, steps: list[Event]) -> float | None:
    """Returns how far the gradients are apart at most; None where rounding does not explain it, or too few are known.

    Args:
        record: of the ranks.
        alone: of one process at its own pace.
        steps: of the ranks, whose values were kept.
    """
    worst, seen = 0.0, 0
    for step, other in _pairs(alone, steps):
        if other["optimizer"] != step["optimizer"]:
            return None
        ours, own = record.gradients(step), alone.gradients(other)
        is_hidden = numerics.are_zero(ours) and numerics.are_zero(own)  # the optimizer asks for gradients by itself
        if is_hidden or record.is_averaged_within:
            ours, own = _moves(record, step), _moves(alone, other)
        apart = numerics.distance(ours, own).worst
        if not apart <= numerics.limit(0.0, ours):
            return None
        worst, seen = max(worst, apart), seen + (not numerics.are_zero(ours))
    return worst if seen >= _FEWEST else None


def go_together(record: Record, alone: Record, until: int | None = None) -> bool:
    """Returns whether one process has the ranks' rates and norms of gradients in all steps, or in those before `until`.

    Its rates are those of all ranks, and the norm of each parameter's gradient is that of every rank.
    """
    if not alone.ranks:
        return False
    count = record.steps if until is None else min(until, record.steps)
    if len(alone.ranks[0].steps) < count:
        return False
    return all(_is_taken(record, alone, place, _most(place)) for place in range(count))


def have_gradients_of(step: Event, other: Event, place: int) -> bool:
    """Returns whether two steps, each the one of this number of its optimizer, have equal rates and norms.

    Parameters are held against each other by their order: another rank's optimizer may be the one whose parameters a
    module has when it steps, and lends its names.
    """
    mine, theirs = step["norms"], other["norms"]
    if step["rates"] != other["rates"] or len(mine) != len(theirs):
        return False
    return _have_norms(dict(zip(theirs, mine.values(), strict=True)), theirs, _most(place))


def _most(place: int) -> float:
    return _NEAR if place < _FIRST else _FAR


def _is_taken(record: Record, alone: Record, place: int, most: float) -> bool:
    """Whether one process takes a step of the ranks, by its rates and the norms of its gradients."""
    other = alone.ranks[0].steps[place]
    return all(
        step["optimizer"] == other["optimizer"]
        and step["rates"] == other["rates"]
        and not rates.settings_apart(step, other)
        and _have_norms(record.norms(step), other["norms"], most)
        for step in record.events_of_step(place)
    )


def each_has_all(record: Record) -> bool:
    """Returns whether the ranks come to one gradient by themselves: with the samples of one process, each of them."""
    own = [record.own(step) for step in record.kept_steps]
    return any(own) and all(
        numerics.distance(other, parts[0]).worst <= numerics.limit(0.0, parts[0])
        for parts in own
        if parts
        for other in parts[1:]
    )


def begins_apart(record: Record, alone: Record) -> bool:
    """Returns whether one process has other gradients at the first step, from the same parameters and at equal rates.

    Not where the script declares that: ranks step by themselves, or compress, or normalise by their own samples; nor
    where one process takes other micro-batches, over which a model may normalise.
    """
    if not (record.ranks and alone.ranks and record.steps and alone.steps) or record.is_cut:
        return False
    starts = [[start["parameters"] for start in one.ranks[0].of("start")] for one in (record, alone)]
    if starts[0] != starts[1] or not starts[0] or record.is_averaged_within or record.has_local_norms:
        return False
    if any(rank.of("hook", "compressed", "local_steps") for rank in record.ranks):
        return False
    steps, other = record.events_of_step(0), alone.ranks[0].steps[0]
    are_replicas = all(step["gradients"] == steps[0]["gradients"] for step in steps)
    is_alike = all(step["rates"] == other["rates"] and step["micro"] == other["micro"] for step in steps)
    return are_replicas and is_alike and not _is_taken(record, alone, 0, _NEAR)


def sudden(record: Record, alone: Record) -> Event | None:
    """Returns the first step that one process takes with other gradients, where it has taken all before as the ranks.

    It is given as many samples in each of them; what rounding makes of steps grows slowly.
    """
    if not alone.ranks or record.is_cut or record.is_averaged_within:
        return None
    ours, theirs = (rates.samples_of_steps(ranks) for ranks in (record.data.ranks, alone.ranks[:1]))
    for place, step in enumerate(record.ranks[0].steps[: min(record.steps, len(alone.ranks[0].steps))]):
        if ours.get(step["window"], 0) != theirs.get(alone.ranks[0].steps[place]["window"], 0):
            return None
        if not _is_taken(record, alone, place, _NEAR):
            is_far = alone.ranks[0].steps[place]["rates"] == step["rates"] and not _is_taken(record, alone, place, _FAR)
            return step if place and is_far else None
    return None


def ends_with_as_many(record: Record, alone: Record) -> bool:
    """Returns whether one process comes to its end with the samples of all ranks, in smaller steps and so in more."""
    mine, theirs = (rates.samples_of_steps(ranks) for ranks in (record.data.ranks, alone.ranks[:1]))
    are_over = all(rank.is_complete for rank in (*record.ranks, *alone.ranks)) and not record.is_cut_short
    rest = sum(theirs.values()) - sum(mine.values())  # of a budget, which fills no step of all ranks
    return are_over and 0 <= rest < max(mine.values(), default=0) and len(theirs) > len(mine)


def judge_tail(record: Record, alone: Record, report: Report) -> None:
    """Adds whether steps that some ranks take under Join, without the others' samples, are those of one process.

    Only where one process takes all steps before as the ranks do, and this one with the same rows.
    """
    if record.uneven is None or not alone.ranks or not go_together(record, alone):
        return
    place = record.uneven["event"]
    longest = max(record.ranks, key=lambda rank: len(rank.steps))
    if not place < min(len(longest.steps), len(alone.ranks[0].steps)):
        return
    step, other = longest.steps[place], alone.ranks[0].steps[place]
    mine, theirs = (calls_in(one, at["window"]) for one, at in ((longest, step), (alone.ranks[0], other)))
    rows = [sorted(row for call in calls for row in call) for calls in (mine, theirs)]
    if not rows[0] or rows[0] != rows[1] or have_gradients_of(step, other, 0):
        return
    factors = [step["norms"][name] / norm for name, norm in other["norms"].items() if norm and step["norms"].get(name)]
    is_one = bool(factors) and max(factors) - min(factors) <= _NEAR * max(factors)
    which = f"are {factors[0]:.4g} times" if is_one else "are not"
    found = Finding(
        code="gradient-differs",
        rank=longest.number,
        step=place,
        factor=round(factors[0], 6) if is_one else None,
        where=record.uneven["where"],
        cause=f"at step {place}, when another rank has used its inputs up, the gradients {which} those of one process "
        "with the same samples, and those of all steps before are equal",
        fix="join(divide_by_initial_world_size=True) divides by the number of all ranks; False by that of the ranks "
        "that still have inputs",
    )
    report.add([replace(found, code="gradient-scale") if is_one else found])


def follows(record: Record, alone: Record) -> bool:
    """Returns whether one process is seen to train as the ranks do, from the first step to the last that was asked for.

    It begins with the same parameters, has their gradients in the first steps, and the norms of these, and the rates,
    in all; and it ends with them, where they end. Where a step averages gradients itself, what it does to the
    parameters tells instead, in all steps whose values were kept.
    """
    if not alone.ranks:
        return False
    others = alone.ranks[0].steps
    if len(others) != record.steps if not record.is_cut_short else not _MANY <= record.steps <= len(others):
        return False
    kept = [step for step in record.kept_steps if record.is_averaged_within or step["event"] < _FIRST]
    if record.is_averaged_within:
        is_together = all(
            step["rates"] == other["rates"] for step, other in zip(record.ranks[0].steps, others, strict=False)
        )
    else:
        is_together = go_together(record, alone, record.asked)  # later ones are taken behind a pass that was ended
    return is_together and worst_error(record, alone, kept) is not None


def arrives(record: Record, alone: Record, *, by_parameters: bool = False) -> bool:
    """Returns whether one process has the ranks' parameters before every step whose values were kept.

    Gradients may be smaller, and rates larger by as much, in all steps to the end; `by_parameters` says that ranks step
    with gradients of their own.
    """
    if not alone.ranks or record.is_cut or alone.is_cut:
        return False
    count = len(alone.ranks[0].steps)
    if count != record.steps if not record.is_cut_short else not _MANY <= record.steps <= count:
        return False
    windows = [step["window"] for step in record.kept_steps]
    states = [(record.parameters(window), alone.parameters(window)) for window in windows]
    known = [(mine, theirs) for mine, theirs in states if mine and mine.keys() == theirs.keys()]
    if len(known) < len(states) or len(known) <= _FIRST or not (by_parameters or _have_one_ratio(record, alone)):
        return False
    begun = known[0][1]
    for mine, theirs in known:
        moved = math.sqrt(sum(float((one - begun[name]).double().square().sum()) for name, one in theirs.items()))
        apart = math.sqrt(sum(float((one - theirs[name]).double().square().sum()) for name, one in mine.items()))
        if apart > _NEAR * moved:
            return False
    return True


def _have_one_ratio(record: Record, alone: Record) -> bool:
    """Whether in all steps the norms of gradients are one multiple of one process's, for which the rates make up."""
    first = 0.0
    for place in range(record.steps):
        other = alone.ranks[0].steps[place]
        for step in record.events_of_step(place):
            mine, theirs = record.norms(step), other["norms"]
            whole = math.hypot(*theirs.values())
            ratio = math.hypot(*mine.values()) / whole if whole else 1.0
            by_rate = [one / rate for one, rate in zip(step["rates"], other["rates"], strict=False) if rate]
            first = first or ratio or 1.0
            is_alike = all(abs(first * one - 1) <= _NEAR for one in by_rate)
            scaled = {name: norm / first for name, norm in mine.items()}
            if step["optimizer"] != other["optimizer"] or not is_alike or not _have_norms(scaled, theirs, _most(place)):
                return False
    return True


def _have_norms(mine: dict[str, float], theirs: dict[str, float], most: float) -> bool:
    """Whether norms agree; no gradient is one of zeros, which an average may make of it."""
    whole = math.hypot(*theirs.values())
    pairs = [(mine.get(name, 0.0), theirs.get(name, 0.0)) for name in mine.keys() | theirs.keys()]
    return all(abs(norm - other) <= most * max(other, _SMALL * whole) for norm, other in pairs)


def _pairs(alone: Record, steps: list[Event]) -> Iterator[tuple[Event, Event]]:
    theirs = {step["event"]: step for rank in alone.ranks for step in rank.steps if step["kept"] is not None}
    yield from ((step, theirs[step["event"]]) for step in steps if step["event"] in theirs)


@dataclass(frozen=True)
class Parting:
    """The first step whose gradients are not those of one process, from parameters that are.

    Attributes:
        before: the step before it, of those that were kept; None where it is the first.
        step: of the ranks.
        other: of one process.
        apart: how far the gradients are apart.
    """

    before: Event | None
    step: Event
    other: Event
    apart: numerics.Distance


def parting(record: Record, alone: Record, steps: list[Event]) -> Parting | None:
    """Returns where the ranks part from one process at its own pace, if rounding does not explain it.

    None also where the parameters have come apart before, or another optimizer steps.
    """
    before = None
    for step, other in _pairs(alone, steps):
        ours, own = record.gradients(step), alone.gradients(other)
        if other["optimizer"] != step["optimizer"] or numerics.are_zero(ours):
            return None
        limit = numerics.limit(0.0, ours)
        apart = numerics.distance(ours, own)
        if apart.worst <= limit:
            before = step
            continue
        states = [one.state(at["window"]) for one, at in ((record, step), (alone, other))]
        if None in states or not apart.whole > _FAR:
            return None
        mine, theirs = (state["parameters"].get(step["optimizer"], {}) for state in states if state is not None)
        is_same = mine.keys() == theirs.keys() and numerics.distance(mine, theirs).worst <= limit
        return Parting(before, step, other, apart) if is_same else None
    return None


def parted(record: Record, alone: Record, steps: list[Event]) -> Iterator[Finding]:
    """Yields a finding if the ranks first have one process's gradients, and then others, from the same parameters.

    Both steps are of one optimizer, and the second draws at no other line than the first: noise that begins in between
    may be each rank's own.
    """
    found = parting(record, alone, steps)
    if found is None or found.before is None or found.before["optimizer"] != found.step["optimizer"]:
        return
    before, step, apart = found.before, found.step, found.apart
    if _draws_at(record, step) <= _draws_at(record, before):
        yield Finding(
            code="gradient-differs",
            step=step["event"],
            tensor=apart.tensor,
            where=record.ranks[0].backward_of(step),
            cause=f"at step {before['event']} the ranks' gradients are those of one process at its own pace, "
            f"and at step {step['event']}, from the same parameters, they are not: an error of {apart.whole:.1e} "
            f"of their norm. {CARRIED_APART}",
            fix="compute what is carried from step to step, such as running statistics, over all ranks",
        )


def _draws_at(record: Record, step: Event) -> set[str]:
    places = [place_of_draw(draw) for rank in record.ranks for draw in rank.of("draw")]
    return {where for window, where in places if window == step["window"]}


def _moves(record: Record, step: Event) -> numerics.Gradients:
    """How far a step moves the parameters; nothing where that was not kept."""
    state = None if record.updated(step) is None else record.state(step["window"])
    if state is None:
        return {}
    before, after = state["parameters"].get(step["optimizer"], {}), record.update(step)["parameters"]
    return {name: after[name] - one for name, one in before.items() if name in after}
