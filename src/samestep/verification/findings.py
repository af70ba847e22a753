"""What `samestep verify` compares, and its findings: data only. No torch here.

LEGS lists the properties of a training: what the ranks record of it, what that is compared with, and the findings. A
note is a difference that the script declares (local BatchNorm statistics, padding): it does not change the verdict.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "note"]
Verdict = Literal["same", "different", "inconclusive"]

EXIT_CODES: dict[Verdict, int] = {"same": 0, "different": 1, "inconclusive": 3}


@dataclass(frozen=True)
class Leg:
    """One property of a training: what it is held against, and what is found where it differs."""

    decides: bool  # whether nothing is called the same without it; the others may be absent from a script
    recorded: str  # what the ranks write down of it
    reference: str  # what that is held against
    codes: tuple[str, ...]  # of the findings


LEGS = {
    "initial_state": Leg(
        decides=True,
        recorded="digests of all parameters before the first step",
        reference="the other ranks, where they are declared, or found, to be copies; of parts, and of buffers, one "
        "process's",
        codes=("initial-state-differs",),
    ),
    "parameter_order": Leg(
        decides=False,
        recorded="names of the parameters that are wrapped, and of those that optimizers hold, in order",
        reference="the other ranks",
        codes=("parameter-order-differs",),
    ),
    "gradients": Leg(
        decides=True,
        recorded="digests at every step; values of some steps, averaged and of each rank's own backward passes",
        reference="one process with the samples of all ranks, from the same parameters; the mean of the ranks' own "
        "where it takes other samples",
        codes=("gradients-not-synchronised", "gradient-scale", "gradient-differs"),
    ),
    "updates": Leg(
        decides=True,
        recorded="parameters and optimizer state after some steps",
        reference="one process's step from the same parameters, state, gradients and rates",
        codes=("update-differs",),
    ),
    "parameters": Leg(
        decides=True,
        recorded="digests before and after every step",
        reference="the other ranks, where they are copies; the parameters that the loss depends on",
        codes=("parameters-diverged", "optimizer-misses-parameters"),
    ),
    "buffers": Leg(
        decides=False,
        recorded="digests where an evaluation uses them; values of those that are no statistics, at some steps",
        reference="the other ranks; what one process makes of them in the same step",
        codes=("buffers-diverged",),
    ),
    "data": Leg(
        decides=True,
        recorded="indices and rows of every batch, or rows of what the models get without a DataLoader",
        reference="each sample once a pass; one dataset on all ranks; what was used before a save; one process's rows",
        codes=("samples-repeated", "samples-missing", "same-order-every-epoch", "datasets-differ", "batches-differ"),
    ),
    "random": Leg(
        decides=False,
        recorded="draws while training, states of dropout, of workers and of datasets' own generators",
        reference="the other ranks, and how much one process draws there; for the same values, the ranks that share a "
        "layer",
        codes=("random-streams",),
    ),
    "control": Leg(
        decides=True,
        recorded="steps, schedules, rates, scalers, and how the run has ended",
        reference="the other ranks; one process from the same weights; its rates, also at its own pace",
        codes=("steps-differ", "learning-rate-differs", "data-parallel-module", "crash"),
    ),
    "communication": Leg(
        decides=True,
        recorded="every collective: what, where, of which shape, in which group",
        reference="the other ranks",
        codes=("collective-order", "collective-mismatch", "hang"),
    ),
    "evaluation": Leg(
        decides=False,
        recorded="sums, printed metrics, samples and parameters of every evaluation",
        reference="one process from the same weights; each sample once",
        codes=("evaluation-inexact", "parameters-diverged"),
    ),
    "checkpoint": Leg(
        decides=False,
        recorded="digests of what is saved, of what is loaded, and of what the first step after a load begins with, "
        "also in a second start after a kill",
        reference="what was there at the save; the steps of a run without a stop",
        codes=("checkpoint-inexact", "samples-repeated", "samples-missing"),
    ),
    "pipeline": Leg(
        decides=False,
        recorded="losses and gradients of the stages",
        reference="the whole model in one process",
        codes=("pipeline-inexact",),
    ),
}
PROPERTIES = tuple(LEGS)
PROVED, AGREES, DECLARED, REFUTED = "identical", "agrees", "agrees as declared", "differs"

DECISIVE = tuple(name for name, leg in LEGS.items() if leg.decides)


def unchecked(why: str) -> str:
    """Returns what coverage says of a property that was not checked."""
    return f"not checked: {why}"


NONE_SEEN = unchecked("none was seen")
NOTHING_SAVED = unchecked("nothing was saved")
NOTHING_DRAWN = unchecked("the script draws nothing itself while it trains")
NO_OUTCOME = unchecked("neither a sum nor a metric of it was seen, nor which samples it takes")
NOT_REACHED = unchecked("not reached in the steps that were recorded; see --steps")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as in one process.

    Attributes:
        code: of the table in :mod:`samestep.verification.pages`.
        severity: "error", or "note" for a difference that is declared.
        property: which of PROPERTIES it is about; by default the first that has the code.
        cause: a sentence.
        fix: code or a sentence that fixes it.
        rank, step, tensor, factor, where: the culprit, as far as known; steps count from 0, `where` is "file:line".
    """

    code: str
    severity: Severity = "error"
    property: str = ""
    cause: str
    fix: str | None = None
    rank: int | None = None
    step: int | None = None
    tensor: str | None = None
    factor: float | None = None
    where: str | None = None

    def __post_init__(self) -> None:
        if not self.property:
            first = next((name for name, leg in LEGS.items() if self.code in leg.codes), self.code)
            object.__setattr__(self, "property", first)
        if self.property not in LEGS or self.code not in LEGS[self.property].codes:
            raise ValueError(f"{self.code} is no finding about {self.property}")

    def as_json(self) -> dict[str, Any]:
        keys = ("code", "severity", "rank", "step", "tensor", "factor", "where", "cause", "fix")
        fields = asdict(self)
        return {key: fields[key] for key in keys}
