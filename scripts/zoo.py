"""Runs `samestep verify` on every script of the zoo and compares what it says with what it should say.

    .venv/bin/python scripts/zoo.py                        everything, one script after another
    .venv/bin/python scripts/zoo.py --only loss-summed gan
    .venv/bin/python scripts/zoo.py --json zoo.json --resume
    .venv/bin/python scripts/zoo.py --write-fixed build/zoo

detected      a buggy script has an error finding with one of the codes of its expected.toml
named         rank, tensor, factor and source line given there are each matched by such a finding
false alarm   a fixed or healthy script has an error finding, or the verdict "different"

It knows verify by its command line and its JSON alone, so it judges any version of it. Exit code 0 when at least
95 % are detected, 90 % named and nothing healthy is accused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ZOO = Path(__file__).resolve().parent.parent / "zoo"
CULPRIT = ("rank", "tensor", "factor", "where")
DETECTED, NAMED = 0.95, 0.90  # of the buggy scripts, and of those that have a culprit to name


@dataclass(frozen=True)
class Case:
    """One script and what verify should say about it. A fixed one's is the buggy script, which is fixed for its run."""

    name: str
    kind: str  # buggy, fixed or healthy
    script: Path
    expected: dict[str, Any]


@dataclass
class Result:
    """What verify said, judged. None where a question does not arise."""

    name: str
    kind: str
    verdict: str  # verify's, or "none" when it wrote no report
    exit: int | None
    seconds: float
    codes: list[str] = field(default_factory=list)
    detected: bool | None = None
    named: bool | None = None
    false_alarm: bool | None = None
    surprise: str = ""


def key(made: Case | Result) -> str:
    """What --resume recognises it by."""
    return f"{made.name}/{made.kind}"


def cases(root: Path = ZOO) -> list[Case]:
    """All scripts: pairs in alphabetical order, buggy before fixed, then the healthy ones."""
    found = []
    for path in sorted(root.glob("*/expected.toml")):
        expected = tomllib.loads(path.read_text())
        found += [Case(path.parent.name, kind, path.with_name("buggy.py"), expected) for kind in ("buggy", "fixed")]
    for script in sorted((root / "healthy").glob("*.py")):
        beside = script.with_suffix(".toml")
        found.append(Case(script.stem, "healthy", script, tomllib.loads(beside.read_text()) if beside.exists() else {}))
    return found


def fixed(case: Case) -> str:
    """The buggy script with every `old` of its fixes replaced by its `new`."""
    source = case.script.read_text()
    for fix in case.expected["fix"]:
        if source.count(fix["old"]) != 1:
            raise ValueError(f"{case.script} must hold this text of a fix once:\n{fix['old']}")
        source = source.replace(fix["old"], fix["new"])
    return source


def observe(case: Case, timeout: float) -> tuple[dict[str, Any] | None, int | None, float]:
    """Verify's report, its exit code and the time it took; None for what never came."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
        script, report = case.script, Path(scratch, "report.json")
        if case.kind == "fixed":
            script = Path(scratch, "fixed.py")
            script.write_text(fixed(case))
        command = [sys.executable, "-m", "samestep", "verify", "-n", str(case.expected.get("ranks", 2))]
        command += ["--json", str(report), str(script), *case.expected.get("args", [])]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        started = time.monotonic()
        try:
            code = subprocess.run(command, cwd=scratch, timeout=timeout, check=False, **silent).returncode
        except subprocess.TimeoutExpired:
            code = None
        return json.loads(report.read_text()) if report.exists() else None, code, time.monotonic() - started


def judge(case: Case, report: dict[str, Any] | None, code: int | None, seconds: float) -> Result:
    """The report held against what was expected."""
    report = report or {"verdict": "none", "findings": []}
    errors = [found for found in report["findings"] if found["severity"] == "error"]
    result = Result(case.name, case.kind, report["verdict"], code, round(seconds, 1), unique(errors))
    if case.kind == "buggy":
        hits = [found for found in errors if found["code"] in case.expected["codes"]]
        given = [trait for trait in CULPRIT if trait in case.expected]
        result.detected = bool(hits)
        if given:
            result.named = all(any(matches(case, trait, found.get(trait)) for found in hits) for trait in given)
    else:
        result.false_alarm = bool(errors) or report["verdict"] == "different"
        notes = set(unique(report["findings"])) - set(result.codes) - set(case.expected.get("notes", []))
        result.surprise = f"note {', '.join(sorted(notes))}" if notes else ""
    return result


def unique(findings: Iterable[dict[str, Any]]) -> list[str]:
    """Their codes, each once, in order."""
    return list(dict.fromkeys(found["code"] for found in findings))


def matches(case: Case, trait: str, told: Any) -> bool:
    """True when one trait of the culprit that a finding tells is the expected one."""
    wanted = case.expected[trait]
    if told is None or trait == "rank":
        return bool(told == wanted)
    if trait == "factor":
        return abs(told - wanted) <= 0.01 * abs(wanted)
    return any(text in (told if trait == "tensor" else source_line(case.script, told)) for text in texts(wanted))


def texts(wanted: str | list[str]) -> list[str]:
    """`where` and `tensor` may name several, each of which is a good answer."""
    return [wanted] if isinstance(wanted, str) else wanted


def source_line(script: Path, where: str) -> str:
    """The line that `file:line` points to, empty when it is another file's or none."""
    file, _, number = where.rpartition(":")
    lines = script.read_text().splitlines()
    inside = Path(file).name == script.name and number.isdigit() and 0 < int(number) <= len(lines)
    return lines[int(number) - 1] if inside else ""


def score(results: Sequence[Result]) -> dict[str, int]:
    """Counts: how many were asked, and how many answers were right."""
    return {
        "buggy": sum(r.kind == "buggy" for r in results),
        "detected": sum(r.detected is True for r in results),
        "with_culprit": sum(r.named is not None for r in results),
        "named": sum(r.named is True for r in results),
        "clean": sum(r.kind != "buggy" for r in results),
        "false_alarms": sum(r.false_alarm is True for r in results),
        "inconclusive": sum(r.verdict in {"inconclusive", "none"} for r in results),
    }


def passed(counts: dict[str, int]) -> bool:
    """True when the targets at the top of this file are met."""
    enough = counts["detected"] >= DETECTED * counts["buggy"] and counts["named"] >= NAMED * counts["with_culprit"]
    return enough and counts["false_alarms"] == 0


def sentence(counts: dict[str, int]) -> str:
    """The score in one line."""
    return (
        "detected {detected} of {buggy} bugs, culprit named {named} of {with_culprit}, "
        "false alarms {false_alarms} of {clean} clean scripts, inconclusive {inconclusive}".format_map(counts)
    )


def row(result: Result) -> str:
    """One line of the table on the screen."""
    answer = "FALSE ALARM" if result.false_alarm else "clean"
    if result.kind == "buggy":
        naming = {True: ", named", False: ", NOT NAMED", None: ""}[result.named]
        answer = ("detected" if result.detected else "MISSED") + naming
    found = ", ".join(result.codes) + (f"  ({result.surprise})" if result.surprise else "")
    return f"{key(result):44} {result.verdict:12} {answer:21} {result.seconds:6.1f} s  {found}".rstrip()


def markdown(listed: Sequence[Case], results: Sequence[Result]) -> str:
    """The documentation page's tables."""
    by_key = {key(result): result for result in results}
    mark = {True: "yes", False: "**no**", None: "-"}
    lines = [sentence(score(results)), "", "| bug | | what is wrong | found as | culprit named | fixed twin |"]
    lines.append("|---|---|---|---|---|---|")
    for case in (case for case in listed if case.kind == "buggy" and key(case) in by_key):
        buggy, twin = by_key[key(case)], by_key.get(f"{case.name}/fixed")
        found = ", ".join(f"`{code}`" for code in buggy.codes if code in case.expected["codes"]) or "**missed**"
        said = "-" if twin is None else ("**accused**" if twin.false_alarm else twin.verdict)
        title = case.expected["title"]
        lines.append(f"| `{case.name}` | {case.expected['id']} | {title} | {found} | {mark[buggy.named]} | {said} |")
    lines += ["", "| healthy script | verdict | seconds |", "|---|---|---|"]
    healthy = [r for r in results if r.kind == "healthy"]
    lines += [f"| `{r.name}` | {'**accused**' if r.false_alarm else r.verdict} | {r.seconds:.0f} |" for r in healthy]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the targets are met, else 1."""
    made = argparse.ArgumentParser(prog="zoo", description="Score `samestep verify` on the scripts of zoo/.")
    made.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these directories or healthy scripts")
    made.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds for one script")
    made.add_argument("--at-once", type=int, default=1, metavar="N", help="so many scripts side by side (default: 1)")
    made.add_argument("--json", type=Path, metavar="OUT", help="write results here, after every script")
    made.add_argument("--resume", action="store_true", help="keep the results that --json OUT already holds")
    made.add_argument("--markdown", type=Path, metavar="OUT", help="write the documentation's tables here")
    made.add_argument("--write-fixed", type=Path, metavar="DIR", help="write the fixed scripts here, and run nothing")
    asked = made.parse_args(argv)
    listed = [case for case in cases() if not asked.only or case.name in asked.only]
    if not listed:
        print(f"zoo: no script of these names: {' '.join(asked.only)}", file=sys.stderr)
        return 2
    if asked.write_fixed:
        asked.write_fixed.mkdir(parents=True, exist_ok=True)
        for case in (case for case in listed if case.kind == "fixed"):
            (asked.write_fixed / f"{case.name}.py").write_text(fixed(case))
        return 0
    known = read(asked.json) if asked.resume and asked.json else {}
    results: list[Result] = []

    def result_of(case: Case) -> Result:
        return known.get(key(case)) or judge(case, *observe(case, asked.timeout))

    with ThreadPoolExecutor(asked.at_once) as pool:
        for result in pool.map(result_of, listed):
            results.append(result)
            print(row(result), flush=True)
            write(asked.json, results)
    counts = score(results)
    print(f"\n{sentence(counts)}")
    if asked.markdown:
        asked.markdown.write_text(markdown(listed, results))
    return 0 if passed(counts) else 1


def read(path: Path) -> dict[str, Result]:
    """Results of an earlier run, by key."""
    found = [Result(**entry) for entry in json.loads(path.read_text())["results"]] if path.exists() else []
    return {key(result): result for result in found}


def write(path: Path | None, results: Sequence[Result]) -> None:
    """Everything known so far, so that a run may be stopped at any time."""
    if path is not None:
        content = {"score": score(results), "results": [asdict(result) for result in results]}
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
