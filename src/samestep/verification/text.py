"""The report as a person reads it: the verdict first, then what is wrong and how to fix it, then what was checked."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from samestep.verification.findings import NOT_REACHED, PROPERTIES, Finding, Verdict, unchecked

__all__: list[str] = []

_WIDTH = 100
_UNSEEN = unchecked("nothing of it was seen")
_AROUND = {"evaluation": "evaluated", "checkpoint": "saved or resumed"}  # what happens beside the training


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


def shown(report: Told, *, verbose: bool = False) -> str:
    """Returns the report, with a line feed at its end.

    Args:
        report: what was found.
        verbose: show every property with its margin, and all remarks; else two lines of what was checked and what not.
    """
    lines = [_title(report), ""]
    for finding in report.findings:
        lines += [*finding_lines(finding), ""]
    lines += _coverage(report) if verbose else _checked(report)
    lines += ["", *(_wrapped(remark, "  ") for remark in report.remarks)] if verbose and report.remarks else []
    return "\n".join(lines).rstrip() + "\n"


def as_markdown(report: Told) -> str:
    """Returns the report for a pull request."""
    lines = [
        f"### samestep verify: {headline(report)}",
        "",
        f"`{' '.join(map(_short, report.script))}`, {_size(report)}",
    ]
    if (why := _why_open(report)) is not None:
        lines += ["", why]
    for finding in report.findings:
        where = f" at `{_short(finding.where)}`" if finding.where else ""
        lines += [
            "",
            f"**{'error' if finding.severity == 'error' else 'note'} `{finding.code}`**{where}: {finding.cause}",
        ]
        lines += ["", f"```\n{source}\n```"] if (source := _source(finding.where)) else []
        lines += ["", f"Fix: {finding.fix}"] if finding.fix is not None else []
    lines += ["", "| property | state |", "|---|---|"]
    for name, state in _states(report):
        margin = f" ({report.margins[name]})" if name in report.margins else ""
        lines.append(f"| {_label(name)} | {_escaped(state + margin)} |")
    lines += ["", *(f"- {_escaped(remark)}" for remark in report.remarks)] if report.remarks else []
    return "\n".join(lines) + "\n"


def headline(report: Told) -> str:
    """Returns the verdict by its outcome: what differs, or what could not be compared.

    >>> from samestep.verification.report import Report
    >>> headline(Report(ranks=2, inconclusive="the script fails alone too"))
    'inconclusive'
    """
    if report.verdict != "different":
        return "the same training" if report.verdict == "same" else "inconclusive"
    wrong = list(dict.fromkeys(finding.property for finding in report.findings if finding.severity == "error"))
    if training := [_label(name) for name in wrong if name not in _AROUND]:
        ends = [finding.code for finding in report.findings if finding.code in {"crash", "hang"}]
        return f"a different training: {' and '.join(ends) if ends else ', '.join(training)}"
    around = " and ".join(_AROUND[name] for name in wrong)
    if _why_open(report) is not None:
        return f"{around} differently; whether it is the same training is open"
    return f"the same training, {around} differently"


def _title(report: Told) -> str:
    text = f"{' '.join(map(_short, report.script))}: {headline(report)} ({_size(report)})"
    why = _why_open(report) if report.verdict == "inconclusive" else None
    return text if why is None else f"{text}\n{_wrapped(why, '  ')}"


def _size(report: Told) -> str:
    return f"{report.ranks} ranks, {'1 step' if report.steps == 1 else f'{report.steps} steps'} compared"


def _why_open(report: Told) -> str | None:
    """Why the training cannot be called the same, whatever differs."""
    if report.inconclusive is not None:
        return report.inconclusive
    told = _by_reason((name, report.coverage.get(name, _UNSEEN)) for name in report.undecided)
    return f"not checked: {told}" if told else None


def _by_reason(states: Iterable[tuple[str, str]]) -> str:
    """The properties, and in parentheses why they were not checked: once for all that it is true of."""
    whys: dict[str, list[str]] = {}
    for name, state in states:
        whys.setdefault(state.partition(": ")[2], []).append(_label(name))
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in whys.items())


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


def _checked(report: Told) -> list[str]:
    """What was checked, what was not, and what was not reached, in a paragraph each."""
    checked, allowed = [], []
    for name, state in _states(report):
        if state == "agrees as declared":
            allowed.append(f"{_label(name)} ({report.margins.get(name, 'as the script declares')})")
        elif state != "differs" and not state.startswith("not checked"):
            checked.append(_label(name))
    lines = [_wrapped(f"checked: {', '.join(checked)}", "  ", "    ")] if checked else []
    lines += [_wrapped(f"agrees as declared: {'; '.join(allowed)}", "  ", "    ")] if allowed else []
    open_ = [(name, state) for name, state in _states(report) if state.startswith("not checked")]
    unchecked = _by_reason(one for one in open_ if one[1] != NOT_REACHED)
    unreached = ", ".join(_label(name) for name, state in open_ if state == NOT_REACHED)
    lines += [_wrapped(f"not checked: {unchecked}", "  ", "    ")] if unchecked else []
    lines += [_wrapped(f"not reached: {unreached}; see --steps", "  ", "    ")] if unreached else []
    return lines


def _coverage(report: Told) -> list[str]:
    width = max(map(len, PROPERTIES))
    lines = []
    for name, state in _states(report):
        margin = f" ({report.margins[name]})" if name in report.margins else ""
        lines.append(f"  {_label(name):<{width}}  {state}{margin}")
    unseen = [_label(name) for name in PROPERTIES if report.coverage.get(name, _UNSEEN) == _UNSEEN]
    return [*lines, f"  not seen: {', '.join(unseen)}"] if unseen else lines


def _states(report: Told) -> list[tuple[str, str]]:
    """The properties of which anything was seen."""
    told = [(name, report.coverage.get(name, _UNSEEN)) for name in PROPERTIES]
    return [(name, state) for name, state in told if state != _UNSEEN]


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
    """A path from where we are, if it is below."""
    here = f"{os.getcwd()}{os.sep}"  # noqa: PTH109  (a text, put before another)
    return where.removeprefix(here)


def _wrapped(text: str, indent: str, hanging: str | None = None) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=hanging or indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
