"""Whether compressed gradients are what the declared codec makes of the ranks' own.

    [1] ā, the averaged gradients, bit for bit             a codec that is another than it says
    [2] what each rank owes behind a step, bit for bit     feedback that is not kept
    [3] what it owes before the next one is the same       feedback that is dropped
    [4] what the optimizer gets is ā, or the multiple of it that clipping makes in one process too

That the ranks' own gradients have the mean which one process computes is compared elsewhere, as without compression.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from samestep.compress.memory import ErrorFeedback
from samestep.runtime.digest import digest
from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.between import Between
from samestep.verification.judging.record import Record
from samestep.verification.judging.simulated import Simulated, codec_of, computing_as
from samestep.verification.judging.single import Run
from samestep.verification.judging.words import plural
from samestep.verification.report import Report

__all__: list[str] = []


def judge(record: Record, whole: Run, report: Report) -> None:
    """Adds what the codecs come to, where a script compresses gradients; `whole` is the script alone."""
    models = record.ranks[0].of("compresses") if record.ranks else []
    if not models:
        return
    mine = [event for event in record.ranks[0].steps[: record.steps] if event["kept"] is not None]
    steps = [step for step in mine if record.compressed(step).models and record.compressed(step).why_not(step) is None]
    judges = [Declared(record, model) for model in models]
    found = next((one for judge in judges for one in judge.findings(steps)), None)
    between = Between(record, whole)
    report.add([found] if found is not None else between.findings(steps))
    if steps and report.coverage.get("gradients") in {AGREES, DECLARED}:
        _cover(steps, judges, [between.why_not, *_unjudged(record, mine)], report)


def _unjudged(record: Record, steps: Sequence[Event]) -> Iterator[str]:
    """Why of some optimizer no step can be judged."""
    reasons: dict[int, list[str | None]] = {}
    for step in steps:
        reasons.setdefault(step["optimizer"], []).append(record.compressed(step).why_not(step))
    yield from (theirs[0] for theirs in reasons.values() if theirs[0] is not None and None not in theirs)


def _cover(steps: list[Event], judges: Sequence[Declared], reasons: Sequence[str | None], report: Report) -> None:
    why = next(filter(None, [*(judge.why_not for judge in judges), *reasons]), None)
    if why is not None:
        report.margins.pop("gradients", None)
        report.cover("gradients", unchecked(why))
        return
    names = ", ".join(dict.fromkeys(judge.name for judge in judges))
    before = report.margins.get("gradients", "agrees")
    margin = f"before {names}: {before}; after it: the declared codec's bits, {plural(len(steps), 'step')}"
    report.cover("gradients", DECLARED, margin)


@dataclass
class Declared:
    """One model's codec.

    Attributes:
        record: of the ranks.
        model: the event that tells of it.
        why_not: why nothing can be said of it, once that is known.
    """

    record: Record
    model: Event
    why_not: str | None = None

    @property
    def name(self) -> str:
        """The codec's."""
        return str(self.model["declared"]["codec"])

    def findings(self, steps: Sequence[Event]) -> Iterator[Finding]:
        """Yields what is not as declared, the first of all first."""
        yield from self._dropped()  # [3]
        codec = codec_of(self.model["declared"])
        if codec is None:
            self.why_not = (
                f"compressed by {self.name}, which is no codec of samestep.compress: what it gives is unknown"
            )
            return
        for step in steps:
            for events in self.record.compressed(step).models:
                if events[0]["number"] == self.model["number"]:
                    yield from self._of_step(step, events, self.record.compressed(step).values(events))

    def _dropped(self) -> Iterator[Finding]:
        for rank in self.record.ranks:
            told = [event for event in rank.of("owed") if event["number"] == self.model["number"]]
            for earlier, later in pairwise(told):
                follows = later["reduction"] == earlier["reduction"] + 1
                if follows and (lost := _differing(earlier["after"], later["before"])) is not None:
                    cause = (
                        f"before step {later['event']} what rank {rank.number} remembers of {lost} is not what "
                        f"{self.name} left in the reduction before: what was lost there is lost for good"
                    )
                    fix = "leave model.compression.memory as it is; a checkpoint of the model keeps it"
                    yield self._finding(later["event"], lost.parameter, cause, fix, rank.number)
                    break

    def _of_step(self, step: Event, events: Sequence[Event], values: list[dict[str, Any]]) -> Iterator[Finding]:
        simulated = self._simulated(events[0], values)
        with computing_as(events[0]):
            expected = simulated.averaged([kept["own"] for kept in values])
        found = next(self._other_bits(step, events, values[0]["averaged"], expected), None)
        found = found or next(self._other_debts(step, events, simulated.memories), None)
        if found is not None and any(gradient.device.type != "cpu" for gradient in expected.values()):
            self.why_not = "what the codec gives on several GPUs could not be repeated to the bit on one"
        elif found is not None:
            yield found

    def _simulated(self, event: Event, values: list[dict[str, Any]]) -> Simulated:
        codec = codec_of(self.model["declared"])
        assert codec is not None
        device = next(iter(values[0]["own"].values())).device
        memories = [ErrorFeedback(device) for _ in values]
        for memory, kept in zip(memories, values, strict=True):
            memory.load(kept["before"])
        return Simulated(codec, self.model["seed"], event["reduction"], dict(self.model["shapes"]), memories)

    def _other_bits(
        self, step: Event, events: Sequence[Event], got: dict[str, Tensor], expected: dict[str, Tensor]
    ) -> Iterator[Finding]:
        """[1] Of the first rank; the others' digests are compared with its."""
        pairs = {name: (got[name], expected[name].to(got[name].device)) for name in got}
        if any(not _same(*pair) for pair in pairs.values()):
            mine, others = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
            apart = numerics.distance(mine, others)
            name = apart.tensor
            yield self._changed(step, name, f"an error of {apart.worst:.1e} of its norm", None)
        for rank, event in enumerate(events):
            other = next(
                (name for name, one in events[0]["averaged"].items() if event["averaged"].get(name) != one), None
            )
            if other is not None:
                yield self._changed(step, other, f"rank {rank} gets something else than rank 0", rank)

    def _changed(self, step: Event, name: str, how: str, rank: int | None) -> Finding:
        cause = (
            f"at step {step['event']} the averaged gradient of {name} is not what the declared codec, {self.name}, "
            f"gives for what the ranks brought and owed: {how}"
        )
        fix = "let nothing change what samestep.compress encodes and decodes; declare what is done, or leave it out"
        return self._finding(step["event"], name, cause, fix, rank)

    def _other_debts(
        self, step: Event, events: Sequence[Event], memories: Sequence[ErrorFeedback]
    ) -> Iterator[Finding]:
        """[2] Of every rank."""
        for rank, memory in enumerate(memories):
            expected = {
                kind: {name: digest(part) for name, part in pieces.items()} for kind, pieces in memory.state().items()
            }
            if (lost := _differing(expected, self._after(rank, events[rank]))) is not None:
                cause = (
                    f"behind step {step['event']} what rank {rank} remembers of {lost} is not what the declared "
                    f"codec, {self.name}, leaves there: what is lost is not added to the next gradient"
                )
                fix = "leave model.compression.memory as it is, or declare feedback=False"
                yield self._finding(step["event"], lost.parameter, cause, fix, rank)

    def _after(self, rank: int, event: Event) -> dict[str, dict[str, str]]:
        told = self.record.ranks[rank].of("owed")
        found: dict[str, dict[str, str]] = next(
            one["after"]
            for one in reversed(told)
            if (one["number"], one["reduction"]) == (event["number"], event["reduction"])
            and one["event"] <= event["event"]
        )
        return found

    def _finding(self, event: int, name: str, cause: str, fix: str, rank: int | None) -> Finding:
        return Finding(
            code="gradient-differs",
            rank=rank,
            step=event,
            tensor=name,
            where=self.model["where"],
            cause=cause,
            fix=fix,
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (torch.isnan(one) & torch.isnan(other))).all())


@dataclass(frozen=True)
class _Memory:
    """Something that a rank remembers: its kind and its piece."""

    kind: str
    piece: str

    @property
    def parameter(self) -> str:
        """Of 'fc.weight@0', 'fc.weight'."""
        return self.piece.rpartition("@")[0]

    def __str__(self) -> str:
        return f"{self.parameter} ({self.kind!r})"


def _differing(one: dict[str, dict[str, str]], other: dict[str, dict[str, str]]) -> _Memory | None:
    """The first piece that is remembered otherwise, or on one side only."""
    for kind in sorted(one.keys() | other.keys()):
        here, there = one.get(kind, {}), other.get(kind, {})
        for piece in [*here, *there]:
            if here.get(piece) != there.get(piece):
                return _Memory(kind, piece)
    return None
