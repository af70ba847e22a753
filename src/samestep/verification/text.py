"""The report as a person reads it: the verdict first, then what is wrong and how to fix it, then what was proved."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from samestep.verification.findings import PROPERTIES, Finding, Verdict, unchecked

__all__: list[str] = []

_WIDTH = 100
_UNSEEN = unchecked("nothing of it was seen")
_VERDICTS = {
    "same": "the same training",
    "different": "a different training",
    "inconclusive": "cannot be said",
}
_STATES = {
    "proved": "proved, bit for bit",
    "agrees": "agrees",
    "agrees as declared": "agrees as declared",
    "refuted": "refuted",
}


class Told(Protocol):
    """What there is to say of a script; :class:`samestep.Report` is it."""

    ranks: int
    steps: int
    script: tuple[str, ...]
    findings: list[Finding]
    coverage: dict[str, str]
    margins: dict[str, str]
    remarks: list[str]
    inconclusive: str | None

    @property
    def verdict(self) -> Verdict:
        """What all of it comes to."""

    @property
    def undecided(self) -> list[str]:
        """What would have decided."""


class Progress:
    """Says on standard error what is being done; on a terminal in one line, which goes away at the end."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def say(self, what: str) -> None:
        """Says it."""
        line = f"samestep: {time.monotonic() - self._began:4.0f} s  {what}"
        sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()


def shown(report: Told) -> str:
    """Returns the whole report, with a line feed at its end."""
    lines = [_headline(report), ""]
    for finding in report.findings:
        lines += [*finding_lines(finding), ""]
    lines += _coverage(report)
    lines += ["", *(_wrapped(remark, "  ") for remark in report.remarks)] if report.remarks else []
    return "\n".join(lines).rstrip() + "\n"


def _headline(report: Told) -> str:
    script = " ".join(map(_short, report.script))
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    text = f"{script} on {report.ranks} ranks: {_VERDICTS[report.verdict]} ({steps} recorded)"
    if report.verdict == "inconclusive":
        why = report.inconclusive or f"what decides was not checked: {', '.join(report.undecided)}"
        text += f"\n{_wrapped(why, '  ')}"
    return text


def finding_lines(finding: Finding) -> list[str]:
    """Returns how one finding is shown."""
    mark = "ERROR" if finding.severity == "error" else "note "
    lines = [f"{mark} {finding.code}" + (f"   {_short(finding.where)}" if finding.where else "")]
    source = _source(finding.where)
    if source:
        lines.append(f"      | {source}")
    lines.append(_wrapped(finding.cause, "      "))
    if finding.fix is not None:
        lines.append(_wrapped(f"fix: {finding.fix}", "      "))
    return lines


def _coverage(report: Told) -> list[str]:
    width = max(map(len, PROPERTIES))
    lines = []
    for name in PROPERTIES:
        state = report.coverage.get(name, _UNSEEN)
        if state == _UNSEEN:
            continue
        margin = f" ({report.margins[name]})" if name in report.margins else ""
        label = name.replace("_", " ")
        lines.append(f"  {label:<{width}}  {_STATES.get(state, state)}{margin}")
    unseen = [name.replace("_", " ") for name in PROPERTIES if report.coverage.get(name, _UNSEEN) == _UNSEEN]
    return [*lines, f"  not seen: {', '.join(unseen)}"] if unseen else lines


def _source(where: str | None) -> str:
    if where is None:
        return ""
    path, _, line = where.rpartition(":")
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[int(line) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def _short(where: str) -> str:
    """A path from where we are, if it is below."""
    here = f"{os.getcwd()}{os.sep}"  # noqa: PTH109  (a text, put before another)
    return where.removeprefix(here)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
