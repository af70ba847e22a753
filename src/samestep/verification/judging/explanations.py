"""What gradients are that are not those of one process.

g    of the ranks          r    of the script alone, with all samples          s₁ … s_N   alone, with one rank's

g = c·r                    a wrong scale: c = 1/N says that a sum was averaged
g = Σ s                    added up, where only a part of each loss is meant to be
g = mean(s), r = Σ wᵢ·sᵢ   a mean of means: the ranks' parts count alike though they are not alike in size
g = mean(s), r otherwise   the loss of the whole batch is no mean over its parts (in-batch negatives, a ratio of sums);
                           a note where BatchNorm of a rank's samples declares it; or something is carried from step
                           to step, by each rank for itself
anything else              is told with its worst tensor, or with a buffer that differs between ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from samestep.text import listed
from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.means import uneven_counts
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Record
from samestep.verification.judging.single import Run

__all__: list[str] = []

ADDED_UP = "the ranks' gradients are added up, not averaged"
CARRIED = "the loss depends on something that is carried from step to step (a history, a running mean)"
_SAME = 1e-3  # of a factor
_MOST_LOST = 0.05  # of the gradient's norm, by a hook that only rounds
_EXPLAINED = 0.02  # a fit that leaves less than this share of a large error unexplained explains it
_FITS = "scale the loss so that gradients fit the type, or reduce them as they are"
_NOTHING = (
    "a mean over a rank's own items is 0/0 where the rank has none of them (tokens, positives), and the average hands "
    "that to all: divide every rank's sum by the items of all ranks; samestep does it in batches.mean(losses, mask)"
)
_CARRIED = 0.2  # of the error; the rest is what a loss that compares samples makes


class Explanations:
    """Of the differences between a recorded run and the script alone."""

    def __init__(self, record: Record, whole: Run, others: Others) -> None:
        self._record = record
        self._whole = whole
        self._others = others

    def of(self, event: Event, apart: numerics.Distance, limit: float, *, settled: bool) -> Finding:
        """Returns what the difference at a step is; `settled` says that an earlier step was found to agree."""
        hooks = self._record.ranks[0].of("hook")
        found = next(self._multiple(event, apart, limit), None)
        if hooks:
            return self._hooked(event, apart, hooks[0], found)
        return (
            found or next(self._of_parts(event, apart, limit, settled=settled), None) or self._unexplained(event, apart)
        )

    def not_finite(self, event: Event, name: str, *, on_ranks: bool) -> Finding:
        """Returns the finding for a step at which gradients are finite on one side only."""
        hook = next(iter(self._record.ranks[0].of("hook")), None) if on_ranks else None
        where, but = ("on the ranks", "in one process") if on_ranks else ("in one process", "on the ranks")
        cause = (
            f"at step {event['event']} the gradient of {name} is not finite (NaN, or infinite) {where}, and is {but}"
        )
        return Finding(
            code="gradient-differs",
            step=event["event"],
            tensor=name,
            where=self._backward(event) if hook is None else hook["where"],
            cause=cause if hook is None else f"{cause}; {hook['name']} reduces them",
            fix=(_FITS if hook is not None else _NOTHING) if on_ranks else None,
        )

    def _multiple(self, event: Event, apart: numerics.Distance, limit: float) -> Iterator[Finding]:
        recorded, alone = self._record.gradients(event), self._whole.gradients(event["event"])
        scaled = numerics.fit(numerics.flat(recorded, alone), [numerics.flat(alone, recorded)])
        if scaled.left < max(limit, _EXPLAINED * apart.whole) and abs(scaled.factors[0] - 1) > _SAME:
            yield self._scaled(event, scaled.factors[0], _right(recorded, alone, scaled.factors[0]))

    def _of_parts(self, event: Event, apart: numerics.Distance, limit: float, *, settled: bool) -> Iterator[Finding]:
        number = event["event"]
        recorded, alone = self._record.gradients(event), self._whole.gradients(number)
        one, whole = numerics.flat(recorded, alone), numerics.flat(alone, recorded)
        runs = self._others.of_ranks()
        if not all(number in run.steps for run in runs):
            return
        parts = [numerics.flat(run.gradients(number), alone) for run in runs]
        mean = sum(parts) / len(parts)
        as_mean = float((one - mean).norm() / one.norm().clamp_min(1e-300))
        if as_mean > max(limit, _EXPLAINED * apart.whole):
            yield from self._of_some(event, one, parts, limit)
            return
        weights = numerics.fit(whole, parts)
        if all(abs(weight * len(parts) - 1) < _SAME for weight in weights.factors):
            return
        if weights.left < max(limit, _EXPLAINED * apart.whole):
            yield self._mean_of_means(event, weights.factors)
        elif self._is_partly_sum(event, whole, parts, limit, apart):
            yield self._partly_sum(event, len(parts))
        elif (counts := uneven_counts(self._record, event)) is not None:
            yield self._partly_mean_of_means(event, counts)
        elif settled and self._is_carried(event, one, limit, apart):
            yield self._carried(event)
        else:
            yield self._composed(event)

    def _is_partly_sum(
        self, event: Event, whole: Any, parts: list[Any], limit: float, apart: numerics.Distance
    ) -> bool:
        """Whether a part of the loss is a sum over samples, and the rest a mean.

        With each of a rank's samples twice, the gradient of the sum is twice as large and that of the mean is the same.
        """
        runs = [] if self._others.twice is None else self._others.twice()
        if not runs or not all(event["event"] in run.steps for run in runs):
            return False
        alone = self._whole.gradients(event["event"])
        sums = [numerics.flat(run.gradients(event["event"]), alone) - one for run, one in zip(runs, parts, strict=True)]
        means = [one - own for one, own in zip(parts, sums, strict=True)]
        left = (sum(sums) + sum(means) / len(means) - whole).norm() / whole.norm().clamp_min(1e-300)
        return float(left) <= max(limit, _EXPLAINED * apart.whole)

    def _partly_sum(self, event: Event, size: int) -> Finding:
        return Finding(
            code="gradient-differs",
            step=event["event"],
            where=self._backward(event),
            cause=f"at step {event['event']} a part of the loss is a sum over a rank's samples, and the rest a mean: "
            f"averaged over {size} ranks, that part counts 1/{size} of what it counts in one process",
            fix="multiply the sum by the number of ranks, or take the mean over a rank's own items",
        )

    def _partly_mean_of_means(self, event: Event, counts: list[float]) -> Finding:
        told = listed([f"{one:g}" for one in counts])
        return Finding(
            code="gradient-differs",
            step=event["event"],
            where=self._backward(event),
            cause=f"at step {event['event']} a part of the loss is a mean over {told} values on the ranks, which count "
            "alike in their average, and by their number in one process",
            fix="divide each rank's sum by the number of items of all ranks, times the world size",
        )

    def _is_carried(self, event: Event, one: Any, limit: float, apart: numerics.Distance) -> bool:
        """Whether the ranks' parts differ from the whole by what came before this step, not by the step's own loss.

        Each run takes all samples at every step but this one, and here those of one rank: a loss that compares samples
        comes to the ranks' gradients then, a state that each rank carries by itself does not.
        """
        runs = [] if self._others.at_step is None else self._others.at_step(event)
        if not runs or not all(event["event"] in run.steps for run in runs):
            return False
        parts = [numerics.flat(run.gradients(event["event"]), self._whole.gradients(event["event"])) for run in runs]
        left = (one - sum(parts) / len(parts)).norm() / one.norm().clamp_min(1e-300)
        return float(left) > max(limit, _CARRIED * apart.whole)

    def _carried(self, event: Event) -> Finding:
        return Finding(
            code="gradient-differs",
            step=event["event"],
            where=self._backward(event),
            cause=f"the first steps agree, and at step {event['event']} the gradients are not those of one process: "
            f"{CARRIED}, and each rank carries its own",
            fix="all_reduce what is carried on, before it is used",
        )

    def _of_some(self, event: Event, one: Any, parts: list[Any], limit: float) -> Iterator[Finding]:
        weights = numerics.fit(one, parts)
        alike = all(abs(weight * len(parts) - 1) < _SAME for weight in weights.factors)
        if weights.left < max(limit, 1e-4) and all(abs(weight - 1) < _SAME for weight in weights.factors):
            yield self._added_up(event, len(parts))
        elif weights.left < max(limit, 1e-4) and not alike:
            shares = ", ".join(f"{factor:.3g}" for factor in weights.factors)
            yield Finding(
                code="gradient-differs",
                step=event["event"],
                where=self._backward(event),
                cause=f"at step {event['event']} the ranks' gradients count {shares} times, where a mean counts each "
                f"{1 / len(parts):.3g} times",
                fix="weigh every rank by its share of the step's samples",
            )

    def _added_up(self, event: Event, size: int) -> Finding:
        return Finding(
            code="gradient-differs",
            step=event["event"],
            where=self._backward(event),
            cause=f"at step {event['event']} {ADDED_UP}: what each rank's loss "
            f"has by itself (a penalty on the weights, say) counts {size} times",
            fix="add such a term on one rank only, or divide it by the number of ranks",
        )

    def _scaled(self, event: Event, factor: float, right: list[str]) -> Finding:
        """Of gradients that are a multiple of one process's, except those that are `right`.

        A rate that is larger by as much as gradients are smaller makes the same step of them, where a step is linear in
        both.
        """
        size, micro = self._record.size, max(event["micro"], 1)
        cause, fix = _meaning(factor, size, micro)
        which = f"every gradient except that of {listed(right)}" if right else "every gradient"
        found = Finding(
            code="gradient-scale",
            step=event["event"],
            factor=round(factor, 6),
            where=self._backward(event),
            cause=f"at step {event['event']} {which} is {factor:.4f} times that of one process: {cause}",
            fix=fix,
        )
        if right or not self._is_made_up_for(event, factor):
            return found
        told = f"the rate makes up for it: {1 / factor:.4g} times one process's, with SGD, whose step is linear in both"
        return replace(found, severity="note", cause=f"{found.cause}; {told}", fix=None)

    def _is_made_up_for(self, event: Event, factor: float) -> bool:
        """Whether every step is the rate times the gradient, or their sum over steps, and the product is the same."""
        optimizers = {one["number"]: one for one in self._record.ranks[0].of("optimizer")}
        alone = [one for rank in self._whole.record.ranks for one in rank.of("rates")]
        step = event["event"], event["optimizer"]
        told = [one["rates"] for one in alone if (one["event"], one["optimizer"]) == step]
        decays = any(group.get("weight_decay") for group in event["settings"])
        clips = any(one["window"] == event["window"] for one in self._record.ranks[0].of("clip"))
        is_linear = optimizers.get(event["optimizer"], {}).get("name") == "SGD" and not (decays or clips)
        rates = list(zip(event["rates"], told[0] if told else [], strict=False))
        return is_linear and bool(rates) and all(abs(factor * mine - one) <= _SAME * one for mine, one in rates)

    def _mean_of_means(self, event: Event, weights: tuple[float, ...]) -> Finding:
        shares = ", ".join(f"{weight:.3f}" for weight in weights)
        return Finding(
            code="gradient-differs",
            step=event["event"],
            where=self._backward(event),
            cause=f"at step {event['event']} the gradient is the mean of the ranks' means, though their parts are not "
            f"alike: one process weighs them {shares}, the ranks {1 / len(weights):.3f} each",
            fix="divide each rank's sum by the number of items of all ranks, times the world size: "
            "F.cross_entropy(…, reduction='sum') * world_size / all_items; samestep does it in batches.mean(losses)",
        )

    def _composed(self, event: Event) -> Finding:
        is_declared = has_local_norms(self._record)
        return Finding(
            code="gradient-differs",
            severity="note" if is_declared else "error",
            step=event["event"],
            where=self._backward(event),
            cause="the loss of the whole batch is no mean over its parts (it compares samples with each other, or is a "
            "ratio of two sums over them, say), so N ranks and one process train on different losses; the ranks' "
            "average is right for what they compute",
            fix="gather what is compared from all ranks, with gradients, or add up the sums of all ranks before they "
            "are divided",
        )

    def _hooked(self, event: Event, apart: numerics.Distance, hook: Event, scaled: Finding | None) -> Finding:
        """What a communication hook loses is declared, unless it loses the gradient itself."""
        if scaled is not None and apart.whole > _MOST_LOST:
            return replace(scaled, where=hook["where"], cause=f"{scaled.cause}; {hook['name']} reduces them")
        lost = apart.whole > _MOST_LOST
        return Finding(
            code="gradient-differs",
            severity="error" if lost else "note",
            step=event["event"],
            where=hook["where"],
            cause=f"{hook['name']} changes the gradients by {apart.whole:.1e} of their norm at step {event['event']}"
            + (": more than rounding them could; they may be too small, or too large, for its type" if lost else ""),
            fix=_FITS if lost else None,
        )

    def _unexplained(self, event: Event, apart: numerics.Distance) -> Finding:
        name = apart.tensor
        buffer = self._differing_buffer(event["window"])
        why = f"; the buffer {buffer} is another on each rank, and nobody keeps it alike" if buffer else ""
        return Finding(
            code="gradient-differs",
            step=event["event"],
            tensor=buffer or name,
            where=self._backward(event),
            cause=f"at step {event['event']} the gradients are not those of one process, most of all that of {name}: "
            f"an error of {apart.worst:.1e} of its norm{why}",
            fix="reduce over all ranks what the buffer is updated from" if buffer else None,
        )

    def _differing_buffer(self, window: int) -> str | None:
        """A buffer of a module that no wrapper looks after, a loss's running state, which differs between ranks."""
        told = [one["others"] for rank in self._record.ranks for one in rank.of("window") if one["number"] == window]
        return next((name for name in told[0] for one in told if one.get(name) != told[0][name]), None)

    def _backward(self, event: Event) -> str:
        window = self._record.ranks[0].by_window.get(event["window"], [])
        where: str = next((one["where"] for one in reversed(window) if one["kind"] == "backward"), event["where"])
        return where


def has_local_norms(record: Record) -> bool:
    """Returns whether a model has BatchNorm that is not synchronised: its statistics are of a rank's own samples."""
    return any(event.get("local_norms") for event in record.ranks[0].of("wrap", "start"))


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
