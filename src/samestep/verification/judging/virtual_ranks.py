"""Whether the ranks' gradient is the average of their parts, where one process cannot be given all samples.

A script that draws or cuts its data by itself, without a DataLoader, trains on other samples when it runs alone. So
each rank's part is computed by a process of its own, before anything clips it:

    with its draws      a world of one process, which gets the numbers that the rank has drawn, and so its samples
    as a virtual rank   a process that takes itself for that rank, where the former has other samples: a script that
                        cuts by rank. A loss that is divided by the number of ranks is so here too, so a factor of
                        that number stays open

What both leave open is said: whether the average over ranks is that over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from samestep.verification import numerics
from samestep.verification.findings import DECLARED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.single import Run
from samestep.verification.judging.words import listed, plural
from samestep.verification.report import Report

__all__: list[str] = []

EVERY_ZERO = "every gradient is zero, on the ranks and in one process"

_NEAR = 1e-3  # of a factor
_BRINGING = {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter", "all_to_all"}
_OPEN = "leaves open whether ranks with different numbers of samples are weighed by them"
_WITH_DRAWS = (
    "the samples come from no DataLoader: gradients were compared with the average of those of one process that draws "
    f"what a rank has drawn, which {_OPEN}"
)
VIRTUAL = (
    "the samples come from no DataLoader, and one process cuts them otherwise: gradients were compared with the "
    f"average of virtual ranks, which {_OPEN}, and whether the loss is divided by the number of ranks once"
)
NO_REFERENCE = (
    "one process takes other samples; the ranks' gradients are the average of what each computes for itself; whether "
    "that is the gradient of all their samples is not known"
)
_WEIGHED = (
    "the gradient is the sum of those that each rank computes, with weights {}: whether the ranks have so many samples "
    "or tokens is not known"
)
_NONE_RAN = "the samples come from no DataLoader, one process cuts them otherwise, and no virtual rank ran"
_CHANGED = "the script changes gradients between backward and step, and by no factor, before or behind the average"
_OTHER_SAMPLES = "virtual ranks draw, or train on, something else than the ranks"
_CARRIED = "virtual ranks have other gradients behind the first step, and may carry something on by themselves"
_BROUGHT = "the loss depends on what the ranks bring together at {}, and a virtual rank has only its own part of that"
_OTHER_DRAWS = "a process that is given what a rank has drawn draws something else besides"
_AGAIN = "virtual ranks have other gradients when they run again: the script draws what could not be recorded"

Runs = Callable[[], list[Run]]


class VirtualRanks:
    """Of the ranks with processes that each compute one rank's part.

    Args:
        record: of the ranks.
        virtual: runs a process that takes itself for a rank, for each.
        again: runs them once more, before anything is accused; None where they would do the same.
        with_draws: runs one process with the draws of a rank, for each; None where it would have other samples.
    """

    def __init__(
        self, record: Record, virtual: Runs, again: Runs | None = None, with_draws: Runs | None = None
    ) -> None:
        self._record = record
        self._virtual = virtual
        self._again = again
        self._with_draws = with_draws

    def judge(self, steps: list[Event], report: Report) -> None:
        """Adds what the comparison at these steps tells."""
        size = self._record.size
        if self._with_draws is not None:
            runs = self._with_draws()
            common = _in_all(runs, steps)
            if common and have_their_samples(self._record, runs, common) and _as_many(self._record, common):
                self._compare(runs, common, (1 / size,), _WITH_DRAWS, report)
                return
        runs = self._virtual()
        common = _in_all(runs, steps)
        if not common:
            report.cover("gradients", unchecked(_NONE_RAN))
            return
        self._compare(runs, common, (1.0, 1 / size), VIRTUAL, report)

    def _compare(
        self, runs: list[Run], common: list[Event], factors: tuple[float, ...], remark: str, report: Report
    ) -> None:
        worst, seen = 0.0, False
        for event in common:
            number = event["event"]
            recorded = self._record.gradients(event)
            own = [run.gradients(number) for run in runs]
            ours = numerics.flat(recorded, *own)
            parts = [numerics.flat(one, recorded, *own) for one in own]
            together = sum(parts[1:], parts[0])
            if not (ours.any() or together.any()):
                continue  # no gradient on either side, and no factor between them
            seen = True
            found = numerics.fit(ours, [together])
            if not numerics.are_finite(recorded) and not all(bool(one.isfinite().all()) for one in parts):
                why = f"from step {number} on gradients are not finite, on the ranks and on virtual ranks alike"
                report.cover("gradients", unchecked(why))
                return
            worst = max(worst, found.left)
            clipped = clipping(self._record, event)
            is_right = clipped is None or any(_is_near(found.factors[0], clipped * one) for one in factors)
            if found.left <= numerics.limit(0.0, recorded) and is_right:
                continue
            if (reason := self._why_not(runs, common, event, virtual=remark is VIRTUAL)) is not None:
                report.cover("gradients", unchecked(reason))
            elif (weights := self._weights(ours, parts, recorded)) is not None:
                report.cover("gradients", unchecked(_WEIGHED.format(weights)))
            elif found.left > numerics.limit(0.0, recorded):
                report.add([self._other(event, found.left)])
            else:
                report.add([self._scaled(event, found.factors[0] / (clipped or 1.0))])
            return
        if not seen:
            report.cover("gradients", unchecked(EVERY_ZERO))
            return
        report.remarks.append(remark)
        who = "virtual ranks" if remark is VIRTUAL else "one process for each rank"
        report.cover("gradients", DECLARED, f"with {who}, worst error {worst:.1e}, {plural(len(common), 'step')}")

    @staticmethod
    def _weights(ours: Tensor, parts: list[Tensor], recorded: numerics.Gradients) -> str | None:
        """The ranks' weights, where the gradient is a weighted sum of theirs with unequal weights; else None."""
        found = numerics.fit(ours, parts)
        if found.left > numerics.limit(0.0, recorded) or not all(factor > 0 for factor in found.factors):
            return None
        if all(_is_near(factor, found.factors[0]) for factor in found.factors):
            return None
        return listed([f"{factor:.3g}" for factor in found.factors])

    def _why_not(self, runs: list[Run], common: list[Event], event: Event, *, virtual: bool) -> str | None:
        """Why a difference is no error."""
        if any(run.ended.code or rank.of("chance") for run in runs for rank in run.record.ranks):
            return _OTHER_SAMPLES if virtual else _OTHER_DRAWS
        if virtual and not have_their_samples(self._record, runs, common):
            return _OTHER_SAMPLES
        if virtual and event is not common[0]:
            return _CARRIED
        if virtual and (where := _brings_together(self._record.ranks[0], event)) is not None:
            return _BROUGHT.format(where)
        recorded = self._record.gradients(event)
        for run in runs:
            used, own = run.used(event["event"]), run.gradients(event["event"])
            if used is not None:
                left = numerics.fit(numerics.flat(used, own), [numerics.flat(own, used)]).left
                if left > numerics.limit(0.0, recorded):
                    return _CHANGED
        again = [] if self._again is None or not virtual else self._again()
        for run, other in zip(runs, again, strict=False):
            if event["event"] not in other.steps:
                return _AGAIN
            apart = numerics.distance(other.gradients(event["event"]), run.gradients(event["event"]))
            if not apart.worst <= numerics.limit(0.0, recorded):
                return _AGAIN
        return None

    def _other(self, event: Event, left: float) -> Finding:
        return Finding(
            code="gradient-differs",
            property="gradients",
            step=event["event"],
            where=event["where"],
            cause=f"at step {event['event']} the gradient is not the average of what each rank computes by "
            f"itself: {left:.1e} of its norm is something else",
            fix="average all gradients between backward and step",
        )

    def _scaled(self, event: Event, factor: float) -> Finding:
        times = factor * self._record.size
        return Finding(
            code="gradient-scale",
            property="gradients",
            step=event["event"],
            factor=round(times, 6),
            where=event["where"],
            cause=f"at step {event['event']} the gradient is {times:.4g} times the average of what each rank computes",
            fix="divide the sum of all ranks by their number, once",
        )


def clipping(record: Record, event: Event) -> float | None:
    """Returns by what the ranks' gradient was multiplied when its norm was clipped; None where that is not known."""
    window = record.ranks[0].by_window.get(event["window"], [])
    told = [min(1.0, one["most"] / (one["norm"] + 1e-6)) for one in window if one["kind"] == "clip"]
    calls = sum(one["kind"] == "clipping" for one in window)  # the norm of cut gradients is not recorded
    return 1.0 if not calls and not told else told[0] if len(told) == 1 == max(calls, 1) else None


def _brings_together(rank: Rank, step: Event) -> str | None:
    """The line at which something of all ranks is brought together before the last backward pass of a step."""
    window = rank.by_window.get(step["window"], [])
    backwards = [place for place, one in enumerate(window) if one["kind"] == "backward"]
    before = window[: backwards[-1]] if backwards else []
    return next((one["where"] for one in before if one["kind"] == "collective" and one["op"] in _BRINGING), None)


def calls_in(rank: Rank, window: int) -> list[tuple[str, ...]]:
    """Returns digests of the rows that a rank's models got in a window, for each call; a wrapper tells it again."""
    events = [event for event in rank.by_window.get(window, []) if event["kind"] == "input" and event["rows"]]
    return list(dict.fromkeys(tuple(event["rows"]) for event in events))


def have_their_samples(record: Record, runs: Sequence[Run], steps: Sequence[Event]) -> bool:
    """Returns whether each run's models have got what those of its rank got, as far as both tell."""
    for rank, run in zip(record.data.ranks, runs, strict=True):
        own = run.record.ranks[0] if run.record.ranks else Rank(0, [])
        if any(calls_in(rank, step["window"]) != calls_in(own, step["window"]) for step in steps):
            return False
    return True


def _in_all(runs: list[Run], steps: list[Event]) -> list[Event]:
    return [event for event in steps if runs and all(event["event"] in run.steps for run in runs)]


def _as_many(record: Record, steps: list[Event]) -> bool:
    """Whether it is known how many samples each rank had, and they are as many."""
    counts = [[sum(map(len, calls_in(rank, step["window"]))) for step in steps] for rank in record.ranks]
    return all(one == counts[0] and all(one) for one in counts)


def _is_near(factor: float, right: float) -> bool:
    return abs(factor / right - 1) < _NEAR
