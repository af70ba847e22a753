"""Judges whether a script that is killed, and started again, goes on as if it had not been.

Both starts, one behind the other, are judged as a script that saves and loads in one process; and the steps of the
second are compared with those that were recorded without a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from samestep.text import numbers
from samestep.verification.claims import differences
from samestep.verification.findings import AGREES, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import resumed, states, storage
from samestep.verification.judging.record import Rank, Record
from samestep.verification.report import Report
from samestep.verification.runner import Runner

_STOPPED = "rank 0 was killed behind step {}, and the script started again"
_NO_MORE = "killed behind a save and started again, the script takes no step"
_NOTHING_LOADED = "killed behind a save and started again, the script loads nothing of it"


def judge(runner: Runner, record: Record, how: dict[str, Any], report: Report) -> None:
    """Starts a script twice that saves while it trains, and has code to load, and judges how the second start goes on.

    `record` is of the ranks without a stop, and `how` what that recording was asked for.
    """
    if report.errors or report.coverage.get("checkpoint") != unchecked(storage.NOT_LOADED):
        return
    saved = _last_saved(record)
    if saved is None:
        return
    step = saved + 1
    second = {"steps": record.asked - saved, "passes": 0}
    killed, again = runner.started_twice(step, {**how, "killed_behind": step}, second)
    if not any(rank.of("killed") for rank in killed.record.ranks) or not again.record.steps:
        report.cover("checkpoint", unchecked(_NO_MORE))
        return
    both = one_after_the_other(killed.record, saved, again.record)
    found = Report(ranks=report.ranks)
    storage.judge(both, found, compares_rates=False)  # those without the stop tell more
    found.add(resumed.judge(both))
    found.add(_differing_ranks(again.record))
    state = found.coverage["checkpoint"]
    if state == unchecked(storage.NOT_LOADED):
        report.cover("checkpoint", unchecked(_NOTHING_LOADED))
        return
    begun = _begins_with(again.record, record)
    if begun is not None and not found.errors:
        repeats = not [*differences([rank.steps[:saved] for rank in record.ranks[:1]], killed.record.ranks[0].steps)]
        found.add(_goes_on(record, again.record, begun, bits=repeats and record.size <= 2))  # one order of adding
    stopped = _STOPPED.format(saved)
    first = found.errors[:1] or found.findings[:1]  # what one rank loses, the others mostly lose too
    about: dict[str, Any] = {"property": "checkpoint", "step": None}
    report.add([replace(one, cause=f"{stopped}: {one.cause}", **about) for one in first])
    if state == PROVED and found.findings:
        state = AGREES
    report.cover("checkpoint", state, f"{stopped}; it goes on with step {saved if begun is None else begun}")


def _differing_ranks(again: Record) -> Iterator[Finding]:
    """Whether the ranks of a second start come apart, as they did not without a stop."""
    compared = Report(ranks=again.size)
    states.judge(again, compared)
    for one in compared.errors[:1]:
        yield Finding(
            code="checkpoint-inexact",
            rank=one.rank,
            tensor=one.tensor,
            where=_loaded_at(again),
            cause=f"the ranks do not go on alike: {one.cause}",
            fix="load on every rank all that changes while training, the optimizer's state too",
        )


def _last_saved(record: Record) -> int | None:
    """The step before which the trained parameters were saved: of several, that nearest to the recording's middle."""
    if not any(rank.of("may_load") for rank in record.ranks):
        return None
    saved = {int(save["event"]) for rank in record.ranks for save in rank.of("save") if _is_of_training(save)}
    among = [event for event in sorted(saved) if 0 < event < record.asked]
    return min(among, key=lambda event: abs(2 * event - record.asked), default=None)


def _is_of_training(save: Event) -> bool:
    trained = set(save.get("state", {}).get("parameters", {}).values())
    return bool(trained & set(save["digests"].values()))


def _begins_with(again: Record, record: Record) -> int | None:
    """The step of the recording that has the parameters with which the second start begins."""
    first = again.ranks[0].steps[0]["parameters"]
    return next(
        (step["event"] for step in record.ranks[0].steps if step["event"] and step["parameters"] == first), None
    )


def _goes_on(record: Record, again: Record, begun: int, *, bits: bool) -> Iterator[Finding]:
    """Compares the steps of a second start with those without a stop, up to the first that has other samples.

    `bits` says that two recordings of the script have equal bits, so that other ones tell something.
    """
    for one, other in zip(record.ranks[0].steps[begun : record.asked], again.ranks[0].steps, strict=False):
        step = one["event"]
        if one["rates"] != other["rates"]:
            yield Finding(
                code="checkpoint-inexact",
                step=step,
                where=_loaded_at(again),
                cause=f"it takes step {step} with the learning rate {numbers(other['rates'])}, and without the "
                f"stop it is {numbers(one['rates'])}: the schedule begins again",
                fix='save {"scheduler": scheduler.state_dict()} as well, and load it',
            )
            return
        if _rows(record, one) != _rows(again, other) or _draws_differ(_drawn(record, one), _drawn(again, other)):
            yield Finding(
                code="checkpoint-inexact",
                step=step,
                severity="note",
                cause=f"from step {step} on it has other samples, or random numbers, than without the stop",
            )
            return
        for _, tensor, _ in differences([[one]], [other]) if bits else ():
            yield Finding(
                code="checkpoint-inexact",
                step=step,
                tensor=tensor,
                where=_loaded_at(again),
                cause=f"step {step} has other bits in {tensor} than without the stop, from the same samples",
                fix="save and load all that changes while training: model, optimizer, schedule, scaler, average",
            )
            return


def _loaded_at(again: Record) -> str | None:
    return next((load["where"] for rank in again.ranks for load in rank.of("load")), None)


def _rows(record: Record, step: Event) -> set[str]:
    """The samples of a step, of all ranks."""
    return {row for _, row in resumed.rows(record, {step["window"]})}


def _drawn(record: Record, step: Event) -> dict[tuple[int, str], list[str | None]]:
    """Rank and line -> what it draws there in a step."""
    drawn: dict[tuple[int, str], list[str | None]] = {}
    for rank in record.ranks:
        for event in rank.of("draw"):
            window, where, _ = event["place"].split("|")
            if window == str(step["window"]):
                drawn.setdefault((rank.number, where), []).append(event["digest"])
    return drawn


def _draws_differ(
    without: dict[tuple[int, str], list[str | None]], again: dict[tuple[int, str], list[str | None]]
) -> bool:
    """Whether a second start draws otherwise; in its first step there is also what a start draws, before that step."""
    return any(again.get(line, [])[-len(drawn) :] != drawn for line, drawn in without.items())


def one_after_the_other(first: Record, steps: int, second: Record) -> Record:
    """Returns both as one recording, the first up to so many steps.

    The steps, windows, passes and optimizers of the second count on.
    """
    ranks = []
    for whole, other in zip(first.ranks, second.ranks, strict=False):
        lost = (i for i, event in enumerate(whole.events) if event["kind"] == "step" and event["event"] >= steps)
        one = Rank(whole.number, whole.events[: next(lost, None)])
        behind = _behind(one)
        ranks.append(Rank(one.number, [*one.events, *map(behind, other.events)]))
    return Record(first.folder, ranks)


def _behind(rank: Rank) -> Callable[[Event], Event]:
    """Returns what moves an event behind all of a rank's."""
    steps, windows = len(rank.steps), max((one["window"] for one in rank.steps), default=-1) + 1
    optimizers, passes = len(rank.of("optimizer")), max((one["number"] for one in rank.of("pass")), default=-1) + 1

    def moved(event: Event) -> Event:
        by = {"event": steps, "window": windows, "optimizer": optimizers}
        by |= {"number": optimizers if event["kind"] == "optimizer" else passes if "key" in event else 0}
        counted = {name: event[name] + by[name] for name in by.keys() & event.keys() if event[name] is not None}
        if "optimizers" in event:
            counted["optimizers"] = [{**one, "number": one["number"] + optimizers} for one in event["optimizers"]]
        return {**event, **counted}

    return moved
