"""What was found of one script, and what it comes to. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from samestep.verification.findings import (
    DECISIVE,
    NO_OUTCOME,
    NONE_SEEN,
    NOT_REACHED,
    PROPERTIES,
    REFUTED,
    Finding,
    Verdict,
    unchecked,
)
from samestep.verification.text import as_markdown, shown

__all__ = ["Report"]

_STEPS = {"gradients", "updates", "parameters", "pipeline"}  # outcomes of a step


@dataclass(kw_only=True)
class Report:
    """What was found of one script.

    Attributes:
        ranks: how many were recorded.
        steps: how many optimizer steps of them.
        findings: errors first.
        coverage: property -> "identical", "agrees", "agrees as declared", "differs" or "not checked: why".
        margins: property -> how well it agrees, in words.
        remarks: what else a reader must know.
        inconclusive: why nothing can be concluded, whatever else agrees; None where it can.
        script: the script and its arguments.
        evidence: what suggests a difference, until it is known whether an outcome differs.
    """

    ranks: int
    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    coverage: dict[str, str] = field(default_factory=dict)
    margins: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    inconclusive: str | None = None
    script: tuple[str, ...] = ()
    evidence: list[Finding] = field(default_factory=list)

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
        """The properties that were not checked and decide: an evaluation, too, of which an outcome was seen."""
        names = [name for name in PROPERTIES if name in DECISIVE or (name == "evaluation" and self.has_evaluated)]
        return [name for name in names if self.coverage.get(name, "not checked").startswith("not checked")]

    @property
    def has_evaluated(self) -> bool:
        """Whether an evaluation has come to something that can be compared."""
        return self.coverage.get("evaluation", NONE_SEEN) not in (NONE_SEEN, NO_OUTCOME, NOT_REACHED)

    def __str__(self) -> str:
        """What a person reads, with every property."""
        return shown(self, verbose=True)

    def as_markdown(self) -> str:
        """Returns the report for a pull request."""
        return as_markdown(self)

    def require_same(self) -> None:
        """Does nothing where the training is the same.

        Raises:
            AssertionError: it is not, or that cannot be said; with the whole report.
        """
        if self.verdict != "same":
            raise AssertionError(f"\n{self}")

    def add(self, findings: Iterable[Finding]) -> None:
        """Takes findings in; what an error is about differs."""
        for finding in findings:
            if finding in self.findings:
                continue
            self.findings.append(finding)
            if finding.severity == "error":
                self.coverage[finding.property] = REFUTED
                self.margins.pop(finding.property, None)
        self.findings.sort(key=lambda finding: finding.severity != "error")

    def suspect(self, findings: Iterable[Finding]) -> None:
        """Remembers what suggests a difference: it explains one that is found, or becomes a note."""
        self.evidence += findings

    def conclude(self) -> None:
        """Adds what was suspected: as an error where the outcome that it would explain differs."""
        differs = any(finding.property in _STEPS for finding in self.errors)
        for finding in self.evidence:
            is_error = differs and finding.property in _STEPS
            self.add([finding if is_error else replace(finding, severity="note", fix=None)])
        self.evidence.clear()

    def relocate(self, found: Finding, located: Finding) -> None:
        """Gives a finding the place that was found for it."""
        self.findings[self.findings.index(found)] = located

    def cover(self, name: str, state: str, margin: str | None = None) -> None:
        """Says how a property came out; what differs stays so."""
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
