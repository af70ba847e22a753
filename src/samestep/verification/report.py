"""The report on one script: findings, coverage, verdict; as text, Markdown and JSON. No torch here."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep.verification.findings import (
    DECISIVE,
    NO_OUTCOME,
    NONE_SEEN,
    NOT_REACHED,
    NOTHING_DRAWN,
    NOTHING_SAVED,
    PROPERTIES,
    REFUTED,
    Finding,
    Verdict,
    unchecked,
)

__all__ = ["Report"]

_STEPS = {"gradients", "updates", "parameters", "pipeline"}  # outcomes of a step
_WIDTH = 100
_ABSENT = {NONE_SEEN, NOTHING_SAVED, NOTHING_DRAWN}  # what a script does not do
_UNSEEN = unchecked("nothing of it was seen")
_UNUSED = {"buffers": "buffers that an evaluation uses"}
_AROUND = {"evaluation": "evaluated", "checkpoint": "saved or resumed"}  # what happens beside the training


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
        return "inconclusive" if self.inconclusive is not None or self.undecided else "same"

    @property
    def undecided(self) -> list[str]:
        """The properties that were not checked and decide: an evaluation, too, of which an outcome was seen."""
        names = [name for name in PROPERTIES if name in DECISIVE or (name == "evaluation" and self.has_evaluated)]
        return [name for name in names if is_open(self, name)]

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

    def withdraw(self, found: Finding, state: str, margin: str) -> None:
        """Takes a finding back: what it is about came out so."""
        self.findings.remove(found)
        if all(one.property != found.property for one in self.errors):
            self.coverage[found.property], self.margins[found.property] = state, margin

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


def is_open(report: Report, name: str) -> bool:
    """Returns whether a property was not checked."""
    return report.coverage.get(name, "not checked").startswith("not checked")


def shown(report: Report, *, verbose: bool = False) -> str:
    """Returns the report as text: with `verbose` every property with its margin, and all remarks."""
    lines = [_title(report), ""]
    for finding in report.findings:
        lines += [*finding_lines(finding), ""]
    lines += _coverage(report) if verbose else _checked(report)
    lines += ["", *(_wrapped(remark, "  ") for remark in report.remarks)] if verbose and report.remarks else []
    return "\n".join(lines).rstrip() + "\n"


def as_markdown(report: Report) -> str:
    """Returns the report for a pull request."""
    script = " ".join(map(_short, report.script))
    lines = [f"### samestep verify: {headline(report)}", "", f"`{script}`, {_size(report)}"]
    if (why := _why_open(report)) is not None:
        lines += ["", why]
    for finding in report.findings:
        where = f" at `{_short(finding.where)}`" if finding.where else ""
        lines += ["", f"**{finding.severity} `{finding.code}`**{where}: {finding.cause}"]
        lines += ["", f"```\n{source}\n```"] if (source := _source(finding.where)) else []
        lines += ["", f"Fix: {finding.fix}"] if finding.fix is not None else []
    lines += ["", "| property | state |", "|---|---|"]
    lines += [f"| {_label(name)} | {_escaped(state)} |" for name, state in _with_margins(report)]
    lines += ["", *(f"- {_escaped(remark)}" for remark in report.remarks)] if report.remarks else []
    return "\n".join(lines) + "\n"


def headline(report: Report) -> str:
    """Returns the verdict by its outcome: what differs, or what could not be compared.

    >>> from samestep.verification.report import Report
    >>> headline(Report(ranks=2, inconclusive="the script fails alone too"))
    'inconclusive'
    """
    if report.verdict != "different":
        return "the same training" if report.verdict == "same" else "inconclusive"
    wrong = list(dict.fromkeys(finding.property for finding in report.findings if finding.severity == "error"))
    if any(name not in _AROUND for name in wrong):
        ends = [finding.code for finding in report.findings if finding.code in {"crash", "hang"}]
        return f"a different training: {' and '.join(ends) if ends else ', '.join(map(_label, wrong))}"
    around = " and ".join(_AROUND[name] for name in wrong)
    if _why_open(report) is not None:
        return f"{around} differently; whether it is the same training is open"
    return f"the same training, {around} differently"


def _title(report: Report) -> str:
    text = f"{' '.join(map(_short, report.script))}: {headline(report)} ({_size(report)})"
    why = _why_open(report) if report.verdict == "inconclusive" else None
    return text if why is None else f"{text}\n{_wrapped(why, '  ')}"


def _size(report: Report) -> str:
    return f"{report.ranks} ranks, {'1 step' if report.steps == 1 else f'{report.steps} steps'} compared"


def _why_open(report: Report) -> str | None:
    """Why the training cannot be called the same, whatever differs."""
    if report.inconclusive is not None:
        return report.inconclusive
    reasons = _by_reason((name, report.coverage.get(name, _UNSEEN)) for name in report.undecided)
    return f"not checked: {reasons}" if reasons else None


def _by_reason(states: Iterable[tuple[str, str]]) -> str:
    """The properties that were not checked, grouped by their reason."""
    whys: dict[str, list[str]] = {}
    for name, state in states:
        whys.setdefault(state.partition(": ")[2], []).append(_label(name))
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in whys.items())


def finding_lines(finding: Finding) -> list[str]:
    """Returns how one finding is shown."""
    mark = "ERROR" if finding.severity == "error" else "note "
    lines = [f"{mark} {finding.code}" + (f"   {_short(finding.where)}" if finding.where else "")]
    lines += [f"      | {source}"] if (source := _source(finding.where)) else []
    lines += [_wrapped(finding.cause, "      ")]
    return lines + ([_wrapped(f"fix: {finding.fix}", "      ")] if finding.fix is not None else [])


def _checked(report: Report) -> list[str]:
    """What was checked, what was not, and what was not reached, in a paragraph each."""
    checked, allowed, absent, unchecked, unreached = [], [], [], [], []
    for name, state in _states(report):
        if state == "agrees as declared":
            allowed.append(f"{_label(name)} ({report.margins.get(name, 'as the script declares')})")
        elif state == NOT_REACHED:
            unreached.append(_label(name))
        elif state in _ABSENT:
            absent.append((name, state))
        elif state.startswith("not checked"):
            unchecked.append((name, state))
        elif state != "differs":
            checked.append(_label(name))
    paragraphs = {
        "checked": ", ".join(checked),
        "agrees as declared": "; ".join(allowed),
        "not checked": _by_reason(unchecked),
        "nothing to check": _by_reason(absent),
        f"not seen within {report.steps} steps": f"{', '.join(unreached)}; see --steps" if unreached else "",
    }
    return [_wrapped(f"{what}: {text}", "  ", "    ") for what, text in paragraphs.items() if text]


def _coverage(report: Report) -> list[str]:
    width = max(map(len, PROPERTIES))
    lines = [f"  {_label(name):<{width}}  {state}" for name, state in _with_margins(report)]
    unseen = [_UNUSED.get(name, _label(name)) for name in PROPERTIES if report.coverage.get(name, _UNSEEN) == _UNSEEN]
    return [*lines, f"  not seen: {', '.join(unseen)}"] if unseen else lines


def _states(report: Report) -> list[tuple[str, str]]:
    """The properties of which anything was seen."""
    states = [(name, report.coverage.get(name, _UNSEEN)) for name in PROPERTIES]
    return [(name, state) for name, state in states if state != _UNSEEN]


def _with_margins(report: Report) -> list[tuple[str, str]]:
    margins = {name: f" ({margin})" for name, margin in report.margins.items()}
    return [(name, _stated(state) + margins.get(name, "")) for name, state in _states(report)]


def _stated(state: str) -> str:
    return state.replace("not checked", "nothing to check") if state in _ABSENT else state


def _label(name: str) -> str:
    return name.replace("_", " ")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _source(where: str | None) -> str:
    if where is None:
        return ""
    path, _, line = where.rpartition(":")
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[int(line) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def _short(where: str) -> str:
    """A path relative to the working directory, if it is below."""
    here = f"{os.getcwd()}{os.sep}"  # noqa: PTH109  (a text, put before another)
    return where.removeprefix(here)


def _wrapped(text: str, indent: str, hanging: str | None = None) -> str:
    wrapper = textwrap.TextWrapper(_WIDTH, indent, hanging or indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)
