"""What `samestep verify` can find, and what it says of a run: data only. No torch here.

A finding is an error or a note. A note is a difference that was declared (local BatchNorm statistics, padding in
training): the script is told of it, and it is no reason to call the training different.

    same          every property that could be checked is proved or agrees, and nothing that decides is left unchecked
    different     at least one error
    inconclusive  neither: the script crashes alone too, or what would decide could not be compared
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__: list[str] = []

Severity = Literal["error", "note"]
Verdict = Literal["same", "different", "inconclusive"]

EXIT_CODES: dict[Verdict, int] = {"same": 0, "different": 1, "inconclusive": 3}

PROPERTIES = (
    "initial_state",
    "parameter_order",
    "gradients",
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
PROVED, AGREES, DECLARED, REFUTED = "proved", "agrees", "agrees as declared", "refuted"

# Without these nobody can say that the training is the same; the others may be absent from a script.
DECISIVE = ("initial_state", "gradients", "parameters", "data", "control", "communication")


def unchecked(why: str) -> str:
    """Returns what coverage says of a property that was not checked."""
    return f"not checked: {why}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as in one process.

    Attributes:
        code: of the table in :mod:`samestep.verification.pages`.
        severity: "error", or "note" for a difference that is declared.
        property: which of PROPERTIES it is about.
        cause: a sentence.
        fix: code or a sentence that mends it.
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


@dataclass(kw_only=True)
class Report:
    """What was found of one script.

    Attributes:
        ranks: how many were recorded.
        steps: how many optimizer steps of them.
        findings: errors first.
        coverage: property -> "proved", "agrees", "agrees as declared", "refuted" or "not checked: why".
        margins: property -> how well it agrees, in words.
        remarks: what else a reader must know.
        inconclusive: why nothing can be concluded, whatever else agrees; None where it can.
    """

    ranks: int
    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    coverage: dict[str, str] = field(default_factory=dict)
    margins: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    inconclusive: str | None = None

    @property
    def errors(self) -> list[Finding]:
        """The findings that make a training different."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def verdict(self) -> Verdict:
        """What all of it comes to."""
        if self.errors:
            return "different"
        if self.inconclusive is not None or self.undecided:
            return "inconclusive"
        return "same"

    @property
    def undecided(self) -> list[str]:
        """The decisive properties that were not checked."""
        return [name for name in DECISIVE if self.coverage.get(name, "not checked").startswith("not checked")]

    def add(self, findings: Iterable[Finding]) -> None:
        """Takes findings in; what an error is about is refuted."""
        for finding in findings:
            if finding in self.findings:
                continue
            self.findings.append(finding)
            if finding.severity == "error":
                self.coverage[finding.property] = REFUTED
        self.findings.sort(key=lambda finding: finding.severity != "error")

    def cover(self, name: str, state: str, margin: str | None = None) -> None:
        """Says how a property came out; what is refuted stays so."""
        if self.coverage.get(name) != REFUTED:
            self.coverage[name] = state
            if margin is not None:
                self.margins[name] = margin

    def as_json(self) -> dict[str, Any]:
        """Returns what `verify --json` writes."""
        return {
            "verdict": self.verdict,
            "ranks": self.ranks,
            "steps": self.steps,
            "findings": [finding.as_json() for finding in self.findings],
            "coverage": {name: self.coverage.get(name, unchecked("nothing of it was seen")) for name in PROPERTIES},
        }
