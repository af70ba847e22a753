"""Compares compressed gradients with what the declared codec makes of the ranks' own.

    [1] ā, the averaged gradients, bit for bit             a codec that is another than it says
    [2] what each rank owes behind a step, bit for bit     feedback that is not kept
    [3] what it owes before the next one is the same       feedback that is dropped
    [4] what the optimizer gets is ā, or the multiple of it that clipping makes in one process too

        ranks    ā ── times f ──► u        alone    g ── times h ──► v

        f = h               the same is done to both
        |u| = |v|           both are cut to one norm
        f = 1, |u| ≤ |v|    only what one process has is too long; h = 1, |u| ≥ |v| the other way round

Any other factor is a mistake, such as a second division by the number of ranks. What is no factor is not compared.
That the ranks' own gradients have the mean which one process computes is compared elsewhere, as without compression.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from samestep import compress
from samestep.compress.chunks import MAX_CHUNK, Chunk, Piece, chunks_of, pieces_of
from samestep.compress.codecs import Codec, RowCodec
from samestep.compress.compressed_mean import PLAIN, ReductionContext, mean, run_all
from samestep.compress.error_feedback import ErrorFeedback
from samestep.runtime.digest import digest
from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record, Run
from samestep.verification.report import Report

_NEAR = 1e-3  # of a factor, and of a norm
_NO_FACTOR = "between backward and step the script changes compressed gradients, and not by a factor"
_KEEP = "leave model.compression.memory as it is"

Debts = Mapping[str, Mapping[str, str]]  # kind -> piece of a parameter -> digest of what a rank owes there


def judge(record: Record, whole: Run, report: Report) -> None:
    """Reports on the codecs of a script that compresses gradients; `whole` is the script alone."""
    models = record.ranks[0].of("compresses") if record.ranks else []
    if not models:
        return
    mine = [event for event in record.ranks[0].steps[: record.steps] if event["kept"] is not None]
    steps = [step for step in mine if record.compressed(step).models and record.compressed(step).why_not(step) is None]
    codecs = [_DeclaredCodec(record, model) for model in models]
    found = next((one for codec in codecs for one in codec.findings(steps)), None)
    behind, why_not = (None, None) if found is not None else _changed_behind(record, whole, steps)
    report.add(one for one in (found, behind) if one is not None)
    if not steps or report.coverage.get("gradients") not in {AGREES, DECLARED}:
        return
    reasons = [*(codec.why_not for codec in codecs), why_not, *_unjudged(record, mine)]
    if why := next(filter(None, reasons), None):
        report.margins.pop("gradients", None)
        report.cover("gradients", unchecked(why))
        return
    names = ", ".join(dict.fromkeys(codec.name for codec in codecs))
    before = report.margins.get("gradients", "agrees")
    margin = f"before {names}: {before}; after it: the declared codec's bits, {plural(len(steps), 'step')}"
    report.cover("gradients", DECLARED, margin)


def _unjudged(record: Record, steps: Sequence[Event]) -> Iterator[str]:
    """Yields why no step of an optimizer can be judged, for each optimizer of which that is so."""
    reasons: dict[int, list[str | None]] = {}
    for step in steps:
        reasons.setdefault(step["optimizer"], []).append(record.compressed(step).why_not(step))
    yield from (theirs[0] for theirs in reasons.values() if theirs[0] is not None and None not in theirs)


# --- what the codec makes of them -------------------------------------------------------------------


@dataclass
class _DeclaredCodec:
    """The codec of one model, which an event tells of; `why_not` says why nothing can be said of it."""

    record: Record
    model: Event
    why_not: str | None = None

    @property
    def name(self) -> str:
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
                    yield from self._of_step(codec, step, events, self.record.compressed(step).values(events))

    def _dropped(self) -> Iterator[Finding]:
        for rank in self.record.ranks:
            events = [event for event in rank.of("owed") if event["number"] == self.model["number"]]
            for earlier, later in pairwise(events):
                follows = later["reduction"] == earlier["reduction"] + 1
                if follows and (lost := _differing(earlier["after"], later["before"])) is not None:
                    cause = (
                        f"before step {later['event']} what rank {rank.number} remembers of {lost} is not what "
                        f"{self.name} left in the reduction before: what was lost there is lost for good"
                    )
                    fix = f"{_KEEP}; a checkpoint of the model keeps it"
                    yield self._finding(later["event"], lost.parameter, cause, fix, rank.number)
                    break

    def _of_step(
        self, codec: Codec, step: Event, events: Sequence[Event], values: list[dict[str, Any]]
    ) -> Iterator[Finding]:
        memories = [ErrorFeedback(next(iter(values[0]["own"].values())).device) for _ in values]
        for memory, kept in zip(memories, values, strict=True):
            memory.load(kept["before"])
        with computing_as(events[0]):
            ranks = SimulatedRanks(codec, self.model["seed"], events[0]["reduction"], memories)
            expected = ranks.averaged(dict(self.model["shapes"]), [kept["own"] for kept in values])
        found = next(self._other_bits(step, events, values[0]["averaged"], expected), None)
        found = found or next(self._other_debts(step, events, memories), None)
        if found is not None and any(gradient.device.type != "cpu" for gradient in expected.values()):
            self.why_not = "what the codec gives on several GPUs could not be repeated to the bit on one"
        elif found is not None:
            yield found

    def _other_bits(
        self, step: Event, events: Sequence[Event], got: dict[str, Tensor], expected: dict[str, Tensor]
    ) -> Iterator[Finding]:
        """[1] Of the first rank; the others' digests are compared with its."""
        expected = {name: expected[name].to(got[name].device) for name in got}
        if any(not _same(got[name], expected[name]) for name in got):
            error = numerics.distance(got, expected)
            yield self._changed(step, error.tensor, f"an error of {error.worst:.1e} of its norm", None)
        for rank, event in enumerate(events):
            for name, one in events[0]["averaged"].items():
                if event["averaged"].get(name) != one:
                    yield self._changed(step, name, f"rank {rank} gets something else than rank 0", rank)
                    break

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
            state = memory.state().items()
            expected = {kind: {name: digest(part) for name, part in pieces.items()} for kind, pieces in state}
            if (lost := _differing(expected, self._after(rank, events[rank]))) is not None:
                cause = (
                    f"behind step {step['event']} what rank {rank} remembers of {lost} is not what the declared "
                    f"codec, {self.name}, leaves there: what is lost is not added to the next gradient"
                )
                fix = f"{_KEEP}, or declare feedback=False"
                yield self._finding(step["event"], lost.parameter, cause, fix, rank)

    def _after(self, rank: int, event: Event) -> Debts:
        events = [one for one in self.record.ranks[rank].of("owed") if one["event"] <= event["event"]]
        which = (event["number"], event["reduction"])
        after: Debts = next(one["after"] for one in reversed(events) if (one["number"], one["reduction"]) == which)
        return after

    def _finding(self, event: int, name: str, cause: str, fix: str, rank: int | None) -> Finding:
        where = self.model["where"]
        return Finding(code="gradient-differs", rank=rank, step=event, tensor=name, where=where, cause=cause, fix=fix)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (torch.isnan(one) & torch.isnan(other))).all())


@dataclass(frozen=True)
class _Debt:
    """Something that a rank owes: its kind, and its piece, such as 'fc.weight@0'."""

    kind: str
    piece: str

    @property
    def parameter(self) -> str:
        return self.piece.rpartition("@")[0]

    def __str__(self) -> str:
        return f"{self.parameter} ({self.kind!r})"


def _differing(one: Debts, other: Debts) -> _Debt | None:
    """The first piece that is remembered otherwise, or on one side only."""
    for kind in sorted(one.keys() | other.keys()):
        here, there = one.get(kind, {}), other.get(kind, {})
        for piece in [*here, *there]:
            if here.get(piece) != there.get(piece):
                return _Debt(kind, piece)
    return None


def codec_of(declared: Mapping[str, Any]) -> Codec | None:
    """Returns the codec that declares itself so; None for one of the script's own."""
    settings = dict(declared)
    kind = getattr(compress, settings.pop("codec"), None)
    if not isinstance(kind, type) or not issubclass(kind, Codec):
        return None
    try:
        codec = kind(**settings)
    except TypeError:
        return None
    return codec if codec.declared() == declared else None


@contextlib.contextmanager
def computing_as(event: Event) -> Iterator[None]:
    """Computes with the threads, and in the precision, of the rank that has recorded it: both decide how sums round."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(event["threads"])
    torch.set_float32_matmul_precision(event["precision"])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


@dataclass(frozen=True)
class SimulatedRanks:
    """All ranks of one reduction in one process.

    A parameter's pieces are cut and numbered by the model alone, so neither the buckets nor the chunks in which the
    ranks have sent them matter, and each parameter is computed by itself.
    """

    codec: Codec  # as declared
    seed: int  # of its noise
    reduction: int  # which one it is, from 0
    memories: Sequence[ErrorFeedback]  # of each rank; changed

    def averaged(self, shapes: Mapping[str, Sequence[int]], own: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns what becomes of each rank's own gradients, by parameter; `shapes` are of all, in order."""
        number, found = 0, {}
        for name, shape in shapes.items():
            taken = self.codec.takes(torch.Size(shape))
            pieces = pieces_of(name, shape, number, most=MAX_CHUNK if self.codec.cuts or not taken else None)
            number += len(pieces)
            if name in own[0]:
                found[name] = self._mean(self.codec if taken else PLAIN, pieces, [theirs[name] for theirs in own])
        return found

    def _mean(self, codec: Codec, pieces: list[Piece], own: Sequence[Tensor]) -> Tensor:
        result, size = own[0].clone(), len(self.memories)
        for chunk in chunks_of(pieces, codec.block if isinstance(codec, RowCodec) else 1):
            schemes = []
            for rank, gradient in enumerate(own):
                context = ReductionContext(chunk, rank, size, self.reduction, self.seed, self.memories[rank])
                schemes.append(mean(codec, context, _flat(chunk, gradient.to(result.device))))
            values = chunk.views(run_all(schemes)[0][0])
            for piece, value in zip(chunk.pieces, values, strict=True):
                _part_of(result, piece).copy_(value)
        return result


def _flat(chunk: Chunk, gradient: Tensor) -> Tensor:
    flat = torch.zeros(chunk.length, device=gradient.device)
    for piece, view in zip(chunk.pieces, chunk.views(flat), strict=True):
        view.copy_(_part_of(gradient, piece))
    return flat


def _part_of(gradient: Tensor, piece: Piece) -> Tensor:
    """A piece is cut from the elements as they lie in memory, which has no holes."""
    lying = gradient.as_strided((gradient.numel(),), (1,))
    return lying[piece.begin : piece.begin + piece.elements].view(piece.shape)


# --- [4] what the script makes of them --------------------------------------------------------------


def _changed_behind(record: Record, whole: Run, steps: Sequence[Event]) -> tuple[Finding | None, str | None]:
    """Returns the first step whose factor one process does not explain, and why that cannot be said of all."""
    why_not = None
    for step in steps:
        if step["event"] not in whole.steps or (theirs := whole.used(step["event"])) is None:
            continue
        got = dict(zip(step["gradients"], record.compressed(step).got(), strict=True))
        mine, norm = _factor(got, record.used(step))
        alone, its_norm = _factor(whole.gradients(step["event"]), theirs)
        if mine is None or alone is None:
            why_not = _NO_FACTOR
        elif not _explained(mine, norm, alone, its_norm):
            cause = (
                f"at step {step['event']} the optimizer gets {mine:.4g} times the averaged gradient, and in one "
                f"process {alone:.4g} times what the loss brings: between backward and step it is multiplied by what "
                "it should not be"
            )
            return Finding(
                code="gradient-scale",
                step=step["event"],
                factor=round(mine / alone if alone else mine, 6),
                where=step["where"],
                cause=cause,
                fix="leave averaged gradients as they are: they are divided by the number of ranks already",
            ), why_not
    return None, why_not


def _factor(before: Any, used: Any) -> tuple[float | None, float]:
    """By which factor gradients become those that the optimizer uses, None if by none; and the norm of these."""
    one, other = numerics.flat(before, used), numerics.flat(used, before)
    norm = float(other.norm())
    if bool((one == other).all()):
        return 1.0, norm
    found = numerics.fit(other, [one])
    return found.factors[0] if found.left <= numerics.limit(0.0, used) else None, norm


def _explained(mine: float, norm: float, alone: float, its_norm: float) -> bool:
    if _near(mine, alone):
        return True
    if mine < 1 and alone < 1:
        return _near(norm, its_norm)
    return (_near(mine, 1) and alone < 1 and norm <= its_norm) or (_near(alone, 1) and mine < 1 and norm >= its_norm)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * abs(other)
