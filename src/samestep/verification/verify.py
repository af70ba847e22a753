"""The whole of `samestep verify`: record, judge, run the script alone, judge again, and say it."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from samestep.verification import journal, runs
from samestep.verification.findings import Finding, Report
from samestep.verification.judging import chance, communication, control, evaluation, samples, states, storage
from samestep.verification.judging.record import Record, read
from samestep.verification.judging.reference import Comparison, Run
from samestep.verification.recording.recorder import FEWEST

__all__: list[str] = []

_ALONE = "samestep.verification.reference.alone:Alone"
_RECORDER = "samestep.verification.recording.recorder:Recorder"

LONG_ENOUGH_S = 10.0  # of steps, if a script does not end before
_LEAD = 4  # steps
_TAIL = 1 << 18  # bytes of a journal in which its last step is looked for
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
    ended = runs.run(
        script, ranks, folder / "recorded", _RECORDER, {"steps": steps}, still_s=still_s, progress=Patience().look
    )
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


class Patience:
    """Lets a script that is not asked for a number of steps come to its end, for a while."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._before = 0

    def look(self, folder: Path) -> None:
        """Names the step to end at, once the ranks have taken steps for long enough."""
        stop = folder / "journals" / journal.STOP
        steps = max((_steps(path) for path in (folder / "journals").glob("rank*.jsonl")), default=0)
        now = time.monotonic()
        if steps and self._began is None:
            self._began = now
        if self._began is not None and now - self._began > LONG_ENOUGH_S and steps >= FEWEST and not stop.exists():
            lead = max(_LEAD, 2 * (steps - self._before))  # ahead of every rank, also while this is being written
            draft = stop.with_suffix(".tmp")
            draft.write_text(str(steps + lead), encoding="ascii")
            draft.rename(stop)
        self._before = steps


def _steps(path: Path) -> int:
    """How many steps a rank's journal tells of; the last one names its number."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        found = re.findall(rb'"kind":"stepped","event":(\d+)', file.read())
    return int(found[-1]) + 1 if found else 0


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
