"""What a rank tells of itself every so many steps: data only. No torch here.

    before step   1        17        33                           of every optimizer
    rank 0        Letter   Letter    Letter   …  Farewell         ┐ the same number, the same optimizer:
    rank 1        Letter   Letter    Letter   …  Farewell         ┘ these are compared

A letter holds what has to be equal, as one digest each. A :class:`Detail` goes with it, which is read only where
digests differ: so a run of many ranks sends rank 0 a few hundred bytes of each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from samestep.runtime.entries import decode_message

__all__: list[str] = []

EVERY = 16  # steps of an optimizer
MOST_OPTIMIZERS = 8  # that write letters; a script with one for each parameter would write as many as it has


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one pass over a DataLoader has yielded since the last letter, and was trained on.

    Attributes:
        key, number: which loader, which of its passes, from 0.
        size: of the dataset.
        sampler: its type.
        indices: the samples, as base64 of 64-bit numbers.
        again: how many of this pass's samples the rank has had twice by itself.
        steps: of training since the pass began.
        rows: index -> digest of a few samples, by which two datasets are told apart.
    """

    key: str
    number: int
    size: int
    sampler: str
    indices: str
    again: int
    steps: int
    rows: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Letter:
    """One rank, before one step.

    Attributes:
        optimizer, step: number of the optimizer, steps that it has taken before.
        where: the line that steps.
        steps: of every optimizer.
        rates: learning rates of the parameter groups.
        schedules: steps of learning-rate schedules so far; `scheduled` is the line of the last.
        scaler: calls, skips and scale of gradient scalers; `scaled` is the line.
        calls: number and running digest of the collectives of all ranks.
        order: digests of the wrapped models' parameter names, in order and sorted.
        names: digest of the optimizer's parameter names and shapes.
        layout: digest of which parts of them the rank holds.
        parameters, gradients: digests of these parts' values; the latter is empty where there is no gradient.
        is_foreign: parameters are cut in a way in which parts cannot be compared.
        is_wrapped: DistributedDataParallel of all ranks holds the model.
        is_dealt: its wrapper, of whichever kind, lets every rank train on data of its own.
        is_together: DistributedDataParallel, and the last forward went through it, so that gradients must be equal.
        made: the line that wrapped the model, or made the optimizer.
        probes: digests of one parameter before every step since the last letter.
        passes: data that was trained on.
    """

    optimizer: int
    step: int
    where: str = ""
    steps: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    schedules: int = 0
    scheduled: str = ""
    scaler: list[float] = field(default_factory=list)
    scaled: str = ""
    calls: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    names: str = ""
    layout: str = ""
    parameters: str = ""
    gradients: str = ""
    is_foreign: bool = False
    is_wrapped: bool = False
    is_dealt: bool = False
    is_together: bool = False
    made: str = ""
    probes: list[str] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What stands behind a letter's digests.

    Attributes:
        parameters, gradients: name -> digest, behind its place where the tensor is cut; None where there is none.
        names: of the wrapped models' parameters, in order.
        calls: the last collectives, as `watching.collectives` tells of them, with their "index".
    """

    parameters: dict[str, str | None]
    gradients: dict[str, str | None]
    names: list[str]
    calls: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Farewell:
    """How a rank has ended: `well` says by the script's own end; `probe` is the probed parameter then."""

    well: bool
    steps: list[int]
    where: str
    probes: dict[str, str]


def written(told: Letter | Detail | Farewell) -> str:
    """Returns it as text."""
    return json.dumps(asdict(told), separators=(",", ":"))


def read_letter(text: str | bytes) -> Letter:
    """Returns a letter that was written."""
    fields = decode_message(text, Letter, of="--check's letter of a rank")
    return Letter(**{**fields, "passes": [Pass(**one) for one in fields["passes"]]})


def read_detail(text: str | bytes) -> Detail:
    """Returns a detail that was written."""
    return Detail(**decode_message(text, Detail, of="--check's detail of a rank"))


def read_farewell(text: str | bytes) -> Farewell:
    """Returns a farewell that was written."""
    return Farewell(**decode_message(text, Farewell, of="--check's farewell of a rank"))
