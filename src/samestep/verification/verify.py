"""The whole of `samestep verify`: record, judge, run the script alone, judge again, and say it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from samestep.verification import runs
from samestep.verification.findings import Finding, Report
from samestep.verification.judging import chance, communication, control, evaluation, samples, states, storage
from samestep.verification.judging.record import Record, read
from samestep.verification.judging.reference import Comparison, Run

__all__: list[str] = []

_ALONE = "samestep.verification.reference.alone:Alone"
_RECORDER = "samestep.verification.recording.recorder:Recorder"

_AT_ONCE = 2  # runs of the script alone, side by side

Say = Callable[[str], None]


def verify(
    script: runs.Script,
    ranks: int,
    *,
    steps: int | None = None,
    still_s: float = runs.STILL_S,
    say: Say = lambda _: None,
) -> Report:
    """Returns what is found of a script when it trains on `ranks` processes.

    Args:
        script: to be verified; run several times.
        ranks: how many processes.
        steps: how many optimizer steps; by default enough to see a second epoch begin, where epochs are short.
        still_s: seconds without a sign of life until a run counts as hung.
        say: is told what goes on.
    """
    folder = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    try:
        return _verified(script, ranks, steps, still_s, folder, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verified(script: runs.Script, ranks: int, steps: int | None, still_s: float, folder: Path, say: Say) -> Report:
    say(f"recording {ranks} ranks")
    ended = runs.run(script, ranks, folder / "recorded", _RECORDER, {"steps": steps or 20}, still_s=still_s)
    record = read(folder / "recorded" / "journals")
    report = Report(ranks=ranks, steps=record.steps)
    states.judge(record, report)
    samples.judge(record, report)
    control.judge(record, report)
    communication.judge(record, report)
    chance.judge(record, report)
    storage.judge(record, report)
    if ended.hung:
        report.add([communication.stuck(record)])
    elif ended.code != 0:
        report.add([_crash(ended)])
    if record.steps:
        _compare(script, record, folder, report, still_s, say)
    return report


def _compare(script: runs.Script, record: Record, folder: Path, report: Report, still_s: float, say: Say) -> None:
    """Runs the script alone and adds what comes of it."""
    everybody = list(range(record.size))

    def alone(name: str, ranks: list[int], *, permuted: bool = False) -> Run:
        order = {"recorded": str(record.folder), "ranks": ranks, "permuted": permuted}
        say(f"running the script alone: {name}")
        ended = runs.run(script, 1, folder / name, _ALONE, order, still_s=still_s)
        return Run(ended, read(folder / name / "journals"))

    def of_ranks() -> list[Run]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda rank: alone(f"rank-{rank}", [rank]), everybody))

    comparison = Comparison(
        record, alone("whole", everybody), lambda: alone("permuted", everybody, permuted=True), of_ranks
    )
    comparison.judge(report)
    evaluation.judge(record, comparison.whole.record, report)


def _crash(ended: runs.Ended) -> Finding:
    failure = ended.failure or {"exception": f"exit code {ended.code}", "message": ended.tail(1)}
    return Finding(
        code="crash",
        property="control",
        rank=failure.get("rank"),
        where=failure.get("where"),
        cause=f"{failure['exception']}: {failure['message']}",
        fix=None,
    )
