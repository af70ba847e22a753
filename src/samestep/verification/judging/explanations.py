"""Explains gradients that are not those of one process.

g    of the ranks          r    of the script alone, with all samples          s₁ … s_N   alone, with one rank's

g = c·r                    a wrong scale: c = 1/N says that a sum was averaged
g = Σ s                    added up, where only a part of each loss is meant to be
g = mean(s), r = Σ wᵢ·sᵢ   a mean of means: the ranks' parts count alike though they are not alike in size
g = mean(s), r otherwise   the loss of the whole batch is no mean over its parts (in-batch negatives, a ratio of
sums), or each rank carries something of its own from step to step
anything else              the worst tensor, or a buffer that differs between ranks, is named
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from samestep.text import listed
from samestep.verification import numerics
from samestep.verification.findings import Finding, Severity
from samestep.verification.journal import Event
from samestep.verification.judging import rates
from samestep.verification.judging.average import (
    are_divided_alike_alone,
    are_divided_by_own_samples,
    uneven_counts,
)
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Record, Run
from samestep.verification.recording.evaluations import STATISTICS

MEAN_OF_MEANS = "the mean of the ranks' means"
ADDED_UP = "the ranks' gradients are added up, not averaged"
_DIVIDED = (
    "at step {} each rank divides a sum over its samples by a constant, such as their number; one process, which is "
    "given the samples of all ranks, divides a larger sum by the same constant"
)
CARRIED = "the loss depends on something that is carried from step to step (a history, a running mean)"
_SAME = 1e-3  # of a factor
_MOST_LOST = 0.05  # of the gradient's norm, by a hook that only rounds
_OWN_SHARE = 0.3  # of the error, of the ranks' gradients before a hook reduces them: then it does not make it
_EXPLAINED = 0.02  # a fit that leaves less than this share of a large error unexplained explains it
_CARRIED = 0.2  # of the error; the rest is what a loss that compares samples makes
_FITS = "scale the loss so that gradients fit the type, or reduce them as they are"
_NOTHING = (
    "a mean over a rank's own items is 0/0 where the rank has none of them (tokens, positives), and the average hands "
    "that to all: divide every rank's sum by the items of all ranks; samestep does it in batches.mean(losses, mask)"
)


@dataclass
class Explanations:
    """Explains the differences between a recorded run and the script alone."""

    record: Record
    whole: Run
    others: Others
    has_no_cause: bool = field(default=False, init=False)  # the last one that was explained

    def of(self, event: Event, apart: numerics.Distance, limit: float, *, settled: bool) -> Finding:
        """Returns what the difference at a step is; `settled` says that an earlier step was found to agree."""
        if (weighed := self._weighed_by_samples(event)) is not None:
            return weighed
        recorded, alone = self.record.gradients(event), self.whole.gradients(event["event"])
        enough = max(limit, _EXPLAINED * apart.whole)
        found = self._multiple(event, recorded, alone, enough)
        hooks = self.record.ranks[0].of("hook")
        if hooks:
            own = numerics.mean(self.record.own(event) or [])
            if own.keys() != alone.keys() or numerics.distance(own, alone).whole < _OWN_SHARE * apart.whole:
                return self._hooked(event, apart, hooks[0], found)
            recorded = own
            found = self._multiple(event, recorded, alone, enough)
        found = found or next(self._of_parts(event, recorded, alone, limit, apart, settled=settled), None)
        return found or self._unexplained(event, apart)

    def _finding(
        self, event: Event, cause: str, fix: str | None, *, severity: Severity = "error", tensor: str | None = None
    ) -> Finding:
        where = self.record.ranks[0].backward_of(event, -1)
        step = event["event"]
        return Finding(
            code="gradient-differs", severity=severity, step=step, tensor=tensor, where=where, cause=cause, fix=fix
        )

    def not_finite(self, event: Event, name: str, *, on_ranks: bool) -> Finding:
        """Returns the finding for a step at which gradients are finite on one side only."""
        hook = next(iter(self.record.ranks[0].of("hook")), None) if on_ranks else None
        where, but = ("on the ranks", "in one process") if on_ranks else ("in one process", "on the ranks")
        cause = (
            f"at step {event['event']} the gradient of {name} is not finite (NaN, or infinite) {where}, and is {but}"
        )
        if hook is not None:
            found = self._finding(event, f"{cause}; {hook['name']} reduces them", _FITS, tensor=name)
            return replace(found, where=hook["where"])
        return self._finding(event, cause, _NOTHING if on_ranks else None, tensor=name)

    def _multiple(self, event: Event, recorded: Any, alone: Any, enough: float) -> Finding | None:
        fitted = numerics.fit(numerics.flat(recorded, alone), [numerics.flat(alone, recorded)])
        factor = fitted.factors[0]
        if not (fitted.left < enough and abs(factor - 1) > _SAME):
            return None
        return self._scaled(event, factor, _right(recorded, alone, factor))

    def _of_parts(
        self, event: Event, recorded: Any, alone: Any, limit: float, apart: numerics.Distance, *, settled: bool
    ) -> Iterator[Finding]:
        step, enough = event["event"], max(limit, _EXPLAINED * apart.whole)
        one, whole = numerics.flat(recorded, alone), numerics.flat(alone, recorded)
        parts = self._parts(self.others.of_ranks(), event)
        if not parts:
            return
        size = len(parts)
        if _error(one, sum(parts) / size) > enough:
            yield from self._of_some(event, one, parts, limit)
            return
        weights = numerics.fit(whole, parts)
        if all(abs(weight * size - 1) < _SAME for weight in weights.factors):
            return
        if weights.left < enough:
            shares = ", ".join(f"{weight:.3f}" for weight in weights.factors)
            yield self._finding(
                event,
                f"at step {step} the gradient is {MEAN_OF_MEANS}, though their parts are not alike: one "
                f"process weighs them {shares}, the ranks {1 / size:.3f} each",
                "divide each rank's sum by the number of items of all ranks, times the world size: "
                "F.cross_entropy(…, reduction='sum') * world_size / all_items; samestep does it in "
                "batches.mean(losses)",
            )
        elif self._is_partly_sum(event, whole, parts, enough):
            if self._has_constants_of_a_rank(event):
                yield self._finding(event, _DIVIDED.format(step), None, severity="note")
                return
            yield self._finding(
                event,
                f"at step {step} a part of the loss is a sum over a rank's samples, and the rest a mean: averaged over "
                f"{size} ranks, that part counts 1/{size} of what it counts in one process",
                "multiply the sum by the number of ranks, or take the mean over a rank's own items",
            )
        elif (counts := uneven_counts(self.record, event)) is not None:
            yield self._finding(
                event,
                f"at step {step} a part of the loss is a mean over {listed([f'{one:g}' for one in counts])} values on "
                "the ranks, which count alike in their average, and by their number in one process",
                "divide each rank's sum by the number of items of all ranks, times the world size",
            )
        elif settled and self._is_carried(event, one, max(limit, _CARRIED * apart.whole)):
            yield self._finding(
                event,
                f"the first steps agree, and at step {step} the gradients are not those of one process: {CARRIED}, and "
                "each rank carries its own",
                "all_reduce what is carried on, before it is used",
            )
        else:
            yield self._finding(
                event,
                "the loss of the whole batch is no mean over its parts (it compares samples with each other, or is a "
                "ratio of two sums over them, say), so N ranks and one process train on different losses; the ranks' "
                "average is right for what they compute",
                "gather what is compared from all ranks, with gradients, or add up the sums of all ranks before they "
                "are divided",
                severity="note" if self.record.has_local_norms and self.whole.rank.of("other_norms") else "error",
            )

    def _parts(self, runs: Sequence[Run], event: Event) -> list[Tensor]:
        """The gradients of one run for each rank, shape [numbers] each; none where one of them lacks the step."""
        if not all(event["event"] in run.steps for run in runs):
            return []
        alone = self.whole.gradients(event["event"])
        return [numerics.flat(run.gradients(event["event"]), alone) for run in runs]

    def _is_partly_sum(self, event: Event, whole: Tensor, parts: list[Tensor], enough: float) -> bool:
        """Whether a part of the loss is a sum over samples, and the rest a mean.

        With each of a rank's samples twice, the gradient of the sum is twice as large and that of the mean is the same.
        """
        twice = [] if self.others.twice is None else self._parts(self.others.twice(), event)
        if not twice:
            return False
        sums = [both - one for both, one in zip(twice, parts, strict=True)]
        means = [one - own for one, own in zip(parts, sums, strict=True)]
        return _error(whole, sum(sums) + sum(means) / len(means)) <= enough

    def _is_carried(self, event: Event, one: Tensor, enough: float) -> bool:
        """Whether the ranks' parts differ from the whole by what came before this step, not by the step's own loss.

        Each run takes all samples at every step but this one, and here those of one rank: a loss that compares samples
        comes to the ranks' gradients then, a state that each rank carries by itself does not.
        """
        parts = [] if self.others.at_step is None else self._parts(self.others.at_step(event), event)
        return bool(parts) and _error(one, sum(parts) / len(parts)) > enough

    def _of_some(self, event: Event, one: Tensor, parts: list[Tensor], limit: float) -> Iterator[Finding]:
        weights, size = numerics.fit(one, parts), len(parts)
        if not weights.left < max(limit, 1e-4):
            return
        if all(abs(weight - 1) < _SAME for weight in weights.factors):
            yield self._finding(
                event,
                f"at step {event['event']} {ADDED_UP}: what each rank's loss has by itself (a penalty on the weights, "
                f"say) counts {size} times",
                "add such a term on one rank only, or divide it by the number of ranks",
            )
        elif any(abs(weight * size - 1) >= _SAME for weight in weights.factors):
            shares = ", ".join(f"{factor:.3g}" for factor in weights.factors)
            yield self._finding(
                event,
                f"at step {event['event']} the ranks' gradients count {shares} times, where a mean counts each "
                f"{1 / size:.3g} times",
                "weigh every rank by its share of the step's samples",
            )

    def _scaled(self, event: Event, factor: float, right: list[str]) -> Finding:
        """Returns the finding for gradients that are a multiple of one process's, except those that are `right`.

        A rate that is larger by as much as gradients are smaller makes the same step of them, where a step is linear in
        both.
        """
        cause, fix = _meaning(factor, self.record.size, max(event["micro"], 1))
        which = f"every gradient except that of {listed(right)}" if right else "every gradient"
        found = Finding(
            code="gradient-scale",
            step=event["event"],
            factor=round(factor, 6),
            where=self.record.ranks[0].backward_of(event, -1),
            cause=f"at step {event['event']} {which} is {factor:.4f} times that of one process: {cause}",
            fix=fix,
        )
        is_divided = not right and abs(factor * self.record.size - 1) <= _SAME
        if is_divided and self._has_constants_of_a_rank(event) and not self._takes_means(event):
            return replace(found, severity="note", cause=_DIVIDED.format(event["event"]), fix=None)
        if right or not self._is_made_up_for(event, factor):
            return found
        made_up = (
            f"the rate makes up for it: {1 / factor:.4g} times one process's, with SGD, whose step is linear in both"
        )
        return replace(found, severity="note", cause=f"{found.cause}; {made_up}", fix=None)

    def _takes_means(self, event: Event) -> bool:
        losses = self.record.ranks[0].in_window(event["window"], "backward")
        return any(term["mean"] for one in losses for term in one.get("terms") or ())

    def _has_constants_of_a_rank(self, event: Event) -> bool:
        own_pace = self.others.own_pace
        return are_divided_by_own_samples(self.record, event) or (
            own_pace is not None and are_divided_alike_alone(self.record, own_pace(), event)
        )

    def _weighed_by_samples(self, event: Event) -> Finding | None:
        """A note where a part of the loss has a weight that one process comes to behind as many samples."""
        if self.others.own_pace is None or rates.are_as_many(self.record, alone := self.others.own_pace()):
            return None
        mine = _factors(self.record.ranks[0].in_window(event["window"], "backward"))
        steps = alone.ranks[0].steps if alone.ranks else []
        near = [event["event"], *range(event["event"] * self.record.size, (event["event"] + 1) * self.record.size + 1)]
        if not mine or not near[-1] < len(steps):
            return None
        now, *theirs = (_factors(alone.ranks[0].in_window(steps[place]["window"], "backward")) for place in near)
        if mine == now or any(len(one) != len(mine) for one in (now, *theirs)):
            return None
        ranges = [(min(one), max(one)) for one in zip(*theirs, strict=True)]
        if any(not low <= one <= high for one, (low, high) in zip(mine, ranges, strict=True)):
            return None
        cause = (
            f"at step {event['event']} a part of the loss has the weight that one process comes to behind as many "
            "samples as those of all ranks: it follows the samples, or is as long as the passes over them"
        )
        return self._finding(event, cause, None, severity="note")

    def is_made_up_for(self, event: Event) -> bool:
        """Whether a rate makes up for gradients that are a multiple of one process's at a step."""
        recorded, alone = self.record.gradients(event), self.whole.gradients(event["event"])
        fitted = numerics.fit(numerics.flat(recorded, alone), [numerics.flat(alone, recorded)])
        return fitted.left < _SAME < abs(fitted.factors[0] - 1) and self._is_made_up_for(event, fitted.factors[0])

    def _is_made_up_for(self, event: Event, factor: float) -> bool:
        """Whether every step is the rate times the gradient, or their sum over steps, and the product is the same."""
        first, step = self.record.ranks[0], (event["event"], event["optimizer"])
        name = next((one["name"] for one in first.of("optimizer") if one["number"] == event["optimizer"]), None)
        alone = [one["rates"] for one in self.whole.rank.of("rates") if (one["event"], one["optimizer"]) == step]
        decays = any(group.get("weight_decay") for group in event["settings"])
        is_linear = name == "SGD" and not (decays or first.in_window(event["window"], "clip"))
        rates = list(zip(event["rates"], alone[0] if alone else [], strict=False))
        return is_linear and bool(rates) and all(abs(factor * mine - one) <= _SAME * one for mine, one in rates)

    def _hooked(self, event: Event, apart: numerics.Distance, hook: Event, scaled: Finding | None) -> Finding:
        """What a communication hook loses is declared, unless it loses the gradient itself."""
        is_lost = apart.whole > _MOST_LOST
        if scaled is not None and is_lost:
            return replace(scaled, where=hook["where"], cause=f"{scaled.cause}; {hook['name']} reduces them")
        cause = f"{hook['name']} changes the gradients by {apart.whole:.1e} of their norm at step {event['event']}"
        if is_lost:
            cause += ": more than rounding them could; they may be too small, or too large, for its type"
        found = self._finding(event, cause, _FITS if is_lost else None, severity="error" if is_lost else "note")
        return replace(found, where=hook["where"])

    def _unexplained(self, event: Event, apart: numerics.Distance) -> Finding:
        buffer = self._differing_buffer(event["window"])
        local = [name for wrap in self.record.ranks[0].of("wrap") for name in wrap.get("unsynchronised", ())]
        why, fix = "", None
        if local:
            why = f"; the model synchronises its other BatchNorm layers, but not {listed(local)}"
            fix = "call convert_sync_batchnorm on the whole model"
        elif buffer:
            why = f"; the buffer {buffer} differs between the ranks"
            fix = "reduce over all ranks what the buffer is updated from"
        elif (buffer := self._begins_apart()) is not None:
            why = f"; the buffer {buffer} differs between the ranks before the first step"
            fix = "broadcast the buffers from rank 0 before the first step, as well as the parameters"
        self.has_no_cause = not why
        return self._finding(
            event,
            f"at step {event['event']} the gradients are not those of one process, most of all that of {apart.tensor}: "
            f"an error of {apart.worst:.1e} of its norm{why}",
            fix,
            tensor=next(iter(local), None) or buffer or apart.tensor,
        )

    def _differing_buffer(self, window: int) -> str | None:
        """A buffer of a module that no wrapper looks after, a loss's running state, which differs between ranks."""
        buffers = [one["others"] for rank in self.record.ranks for one in rank.of("window") if one["number"] == window]
        return next((name for name in buffers[0] for one in buffers if one.get(name) != buffers[0][name]), None)

    def _begins_apart(self) -> str | None:
        """A buffer that differs between the ranks at the start, and that no wrapper broadcasts."""
        if any(wrap.get("broadcasts") for rank in self.record.ranks for wrap in rank.of("wrap")):
            return None
        starts = [start.get("buffers", {}) for rank in self.record.ranks for start in rank.of("start")[:1]]
        first, *others = starts or [{}]
        apart = (name for name, one in first.items() if any(each.get(name) != one for each in others))
        return next((name for name in apart if not name.endswith(STATISTICS)), None)


def _factors(losses: Iterable[Event]) -> list[float]:
    """The constant factors of all terms of some losses."""
    return [float(term["factor"]) for one in losses for term in one.get("terms") or ()]


def _error(one: Tensor, other: Tensor | float) -> float:
    return float((one - other).norm() / one.norm().clamp_min(1e-300))


def _right(recorded: numerics.Gradients, alone: numerics.Gradients, factor: float) -> list[str]:
    """Names of the gradients that are one process's, where the others are `factor` times as large."""
    pairs = {name: (one, alone.get(name)) for name, one in recorded.items()}
    return [
        name
        for name, (one, other) in pairs.items()
        if one is not None and other is not None and (one - other).norm() < _EXPLAINED * (one - factor * other).norm()
    ]


def _meaning(factor: float, size: int, micro: int) -> tuple[str, str]:
    def near(value: float) -> bool:
        return abs(factor / value - 1) < 0.01

    if near(1 / size):
        return (
            f"1/{size}, the number of ranks: a sum is averaged (DistributedDataParallel divides by it)",
            "(loss * world_size).backward(), or a mean over the items of all ranks",
        )
    if near(size):
        return f"{size}, the number of ranks: the loss, or the gradient, is multiplied by it", "leave the factor out"
    if micro > 1 and near(1 / micro):
        return f"1/{micro}, the number of micro-batches: it is divided by it twice", "divide once"
    if micro > 1 and near(micro):
        return f"{micro}, the number of micro-batches: it is not divided by it", f"(loss / {micro}).backward()"
    return "a constant factor", "look for what multiplies or divides on several ranks only"
