"""What `samestep verify` can find, and what it says of a run: data only. No torch here.

A finding is an error or a note. A note is a difference that was declared (local BatchNorm statistics, padding in
training): the script is told of it, and it is no reason to call the training different.

    same          every property that could be checked is identical or agrees, and all that decide were checked
    different     at least one error
    inconclusive  neither: the script crashes alone too, the machine ended the ranks, or what would decide could not be
                  compared
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__: list[str] = []

Severity = Literal["error", "note"]
Verdict = Literal["same", "different", "inconclusive"]

EXIT_CODES: dict[Verdict, int] = {"same": 0, "different": 1, "inconclusive": 3}

PROPERTIES = (
    "initial_state",
    "parameter_order",
    "gradients",
    "updates",
    "parameters",
    "buffers",
    "data",
    "random",
    "control",
    "communication",
    "evaluation",
    "checkpoint",
    "pipeline",
)
PROVED, AGREES, DECLARED, REFUTED = "identical", "agrees", "agrees as declared", "differs"

# Without these nobody can say that the training is the same; the others may be absent from a script.
DECISIVE = ("initial_state", "gradients", "updates", "parameters", "data", "control", "communication")


def unchecked(why: str) -> str:
    """Returns what coverage says of a property that was not checked."""
    return f"not checked: {why}"


NOT_REACHED = unchecked("not reached in the steps that were recorded; see --steps")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as in one process.

    Attributes:
        code: of the table in :mod:`samestep.verification.pages`.
        severity: "error", or "note" for a difference that is declared.
        property: which of PROPERTIES it is about.
        cause: a sentence.
        fix: code or a sentence that fixes it.
        rank, step, tensor, factor, where: the culprit, as far as known; steps count from 0, `where` is "file:line".
    """

    code: str
    severity: Severity = "error"
    property: str
    cause: str
    fix: str | None = None
    rank: int | None = None
    step: int | None = None
    tensor: str | None = None
    factor: float | None = None
    where: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of `verify --json`."""
        keys = ("code", "severity", "rank", "step", "tensor", "factor", "where", "cause", "fix")
        told = asdict(self)
        return {key: told[key] for key in keys}
