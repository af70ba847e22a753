"""Where a run's files lie."""

from __future__ import annotations

import pytest

from samestep.paths import RunDirectory, default_run_path, rank_file


@pytest.mark.parametrize(
    ("program", "stem"),
    [("sub/train.py", "train"), ("package.train", "package.train"), ("a b!.py", "a-b"), ("...", "run")],
)
def test_a_run_is_named_after_its_program(tmp_path, program, stem):
    path = default_run_path(program, tmp_path)
    assert path.parent == tmp_path / "runs"
    assert path.name.startswith(f"{stem}-2")
    assert not path.parent.exists()


def test_two_runs_of_one_second_differ(tmp_path):
    assert default_run_path("train.py", tmp_path) != default_run_path("train.py", tmp_path)


def test_each_rank_has_files_of_its_own(tmp_path):
    run = RunDirectory(tmp_path)
    assert rank_file(run.logs("host"), 3, "err") == tmp_path / "0/host/rank3.err"
    assert rank_file(run.logs("host", attempt=2), 3, "out") == tmp_path / "2/host/rank3.out"
