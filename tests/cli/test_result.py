"""The file that `--json` names holds what was found, or the exit code tells that it does not."""

from __future__ import annotations

import json

import pytest

from samestep.cli.checks import write_json
from samestep.errors import UsageError


@pytest.mark.parametrize(("code", "then"), [(0, 2), (1, 1), (3, 3)])
def test_a_result_that_is_not_written_is_never_a_success(tmp_path, capsys, code, then):
    (tmp_path / "file").write_text("no folder")
    assert write_json(tmp_path / "file" / "result.json", {}, code) == then
    assert capsys.readouterr().err.startswith(f"samestep: error: --json {tmp_path}/file/result.json cannot be written")


def test_what_is_written_is_whole_and_the_code_stays(tmp_path):
    assert write_json(tmp_path / "result.json", {"exit": 3}, 3) == 3
    assert json.loads((tmp_path / "result.json").read_text()) == {"exit": 3}
    assert write_json(None, {"exit": 0}) == 0


def test_checkpoints_are_not_read_for_a_file_that_cannot_be_written(tmp_path):
    from samestep.cli import checkpoint

    with pytest.raises(UsageError, match=r"--json .*/nowhere/all.json cannot be written: there is no directory"):
        checkpoint.main(["verify", str(tmp_path), "--json", str(tmp_path / "nowhere" / "all.json")])
