"""Whether a step does to buffers what it does to them in one process: a queue of keys, a running centre, a codebook.

The script alone begins a step with the recorded parameters and buffers, so what its buffers are at the next one is what
all samples make of them. On ranks each may use its own part only, and DistributedDataParallel hides that: it sends
rank 0's buffers to all. Statistics of BatchNorm are left out: they are local unless the script asks for more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.verification.findings import AGREES, DECLARED, Finding
from samestep.verification.judging.record import Record
from samestep.verification.judging.single import Run
from samestep.verification.report import Report

__all__: list[str] = []

_APART = 1e-3  # of a buffer's norm
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def judge(record: Record, whole: Run, report: Report) -> None:
    """Adds what the buffers tell, where the gradients are known to be those of one process."""
    if report.coverage.get("gradients") in {AGREES, DECLARED} and whole.record.ranks:
        report.add(_moved(record, whole))


def _moved(record: Record, whole: Run) -> Iterator[Finding]:
    alone = whole.record.ranks[0]
    for event in alone.of("moved"):
        state = record.state(event["window"])
        if state is None or event["kept"] is None:
            continue
        theirs = whole.record.value(0, event["kept"])
        for name, buffer in state["buffers"].items():
            if not name.endswith(_STATISTICS) and name in theirs and _is_apart(buffer, theirs[name]):
                yield _finding(record, event["window"] - 1, name)
                return


def _is_apart(mine: Any, theirs: Any) -> bool:
    if mine.shape != theirs.shape or not mine.is_floating_point() or not mine.numel():
        return False
    error = (mine.double() - theirs.double()).norm()
    return bool(error > _APART * theirs.double().norm().clamp_min(1e-12))


def _finding(record: Record, window: int, name: str) -> Finding:
    told = record.ranks[0].by_window.get(window, [])
    step = next((one["event"] for one in told if one["kind"] == "step"), window)
    return Finding(
        code="buffers-diverged",
        property="buffers",
        step=step,
        tensor=name,
        where=next((one["where"] for one in told if one["kind"] == "backward"), None),
        cause=f"step {step} leaves other values in the buffer {name} than in one process: each rank updates it from "
        "its own samples, and the ranks go on with rank 0's",
        fix="all_gather, or all_reduce, what it is updated from, before the update",
    )
