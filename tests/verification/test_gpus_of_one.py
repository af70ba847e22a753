"""How many GPUs the script alone sees: as many as one of the ranks has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.verification import runner, runs
from samestep.verification.files import Files
from samestep.verification.journal import TraceWriter
from samestep.verification.judging.record import read


@pytest.mark.parametrize(
    ("ranks", "fake", "named", "seen"),
    [
        (2, "2", None, "0"),
        (2, "4", None, "0,1"),
        (4, "2", None, "0"),
        (2, "1", None, None),
        (2, "4", "3,1,2", "3"),
        (2, "2", "5,6,7,8", "5"),
        (2, None, None, None),
    ],
)
def test_one_process_sees_the_gpus_of_a_rank(
    ranks: int, fake: str | None, named: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: 0)
    for name, value in (("SAMESTEP_FAKE_GPUS", fake), ("CUDA_VISIBLE_DEVICES", named)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert runner.gpus_of_one(ranks) == ({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})


def test_a_script_that_insists_on_more_gpus_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saw: list[str | None] = []

    def run(_script: Any, _ranks: int, folder: Path, *_: Any, variables: dict[str, str], **__: Any) -> runs.Ended:
        saw.append(variables.get("CUDA_VISIBLE_DEVICES"))
        journal = TraceWriter(folder / "journals", 0)
        journal.write("begin", rank=0, size=1, pid=1)
        if saw[-1] is None:
            journal.write("step", event=0, kept=None)
        return runs.Ended(code=0, hung=False, failure=None, folder=folder)

    monkeypatch.setattr(runs, "run", run)
    ranks = TraceWriter(tmp_path / "ranks", 0)
    ranks.write("begin", rank=0, size=2, pid=1)
    ranks.write("step", event=0, kept=None)
    one = runner.Runner(
        script=runs.Script(program="x.py"),
        ranks=2,
        folder=tmp_path,
        files=Files([], tmp_path),
        still_s=60.0,
        say=lambda _: None,
        gpus_of_one={"CUDA_VISIBLE_DEVICES": "0"},
    )
    assert one.alone("all samples", read(tmp_path / "ranks")).steps
    assert one.alone("another order", read(tmp_path / "ranks")).steps
    assert saw == ["0", None, None]
