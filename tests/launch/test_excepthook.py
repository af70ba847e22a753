"""An error of samestep's own is told in a sentence, and its traceback stands in the log; a script's own is shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from samestep.errors import CheckpointError, DataError, PeerError, RankFailure, StepError
from samestep.launch.rank.excepthook import needs_no_traceback
from samestep.launch.rank.failure import describe
from samestep.rankenv import fresh_environment


def raised(kind, *arguments, after=None):
    """An error raised here, perhaps because of another."""
    try:
        try:
            if after is not None:
                after()
        except ValueError as cause:
            raise kind(*arguments) from cause
        raise kind(*arguments)
    except kind as error:
        return error


def in_the_script():
    raise ValueError


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (raised(StepError, "the step is not over"), True),
        (raised(CheckpointError, "it does not fit"), True),
        (raised(StepError, "the model refused it", after=in_the_script), False),  # its line is wanted too
        (raised(ValueError, "no"), False),
        (raised(PeerError, "rank 1 failed"), False),
        (raised(RankFailure, 1, "with a traceback of its own"), False),
        (raised(DataError, "a usage error is the launcher's"), False),
    ],
)
def test_what_says_it_all(error, short):
    assert needs_no_traceback(error, describe(error, 0)) is short


def test_a_script_s_own_way_of_showing_exceptions_is_left_to_it(monkeypatch):
    error = raised(StepError, "the step is not over")
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    assert not needs_no_traceback(error, describe(error, 0))


def test_the_sentence_is_shown_once_and_each_log_has_the_traceback(folder):
    script = folder.script("""
        import samestep, torch
        from torch.utils.data import TensorDataset
        with samestep.world() as world:
            batches = samestep.shards(TensorDataset(torch.ones(8, 2)), world, batch_size=8, micro_batch_size=2)
            for (x,) in batches:
                batches.commit()
    """)
    done = folder.run("-n", 2, script)
    line = (folder.path / script).read_text().splitlines().index("        batches.commit()") + 1
    assert done.returncode == 1
    assert (
        f"[2 ranks] samestep: stops at train.py:{line} with StepError; the rank's log has the traceback" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert done.stderr.count("the step is not over") == 1
    assert f"at train.py:{line}  batches.commit()" in done.stderr
    for rank in range(2):
        log = folder.logs()[f"rank{rank}.err"]
        assert log.count("Traceback (most recent call last)") == 1
        assert "samestep.errors.StepError: the step is not over" in log


@pytest.mark.parametrize("hook", ["", "sys.excepthook = lambda *_: print('a hook of its own', file=sys.stderr)"])
def test_wrong_variables_are_one_line_without_the_launcher_too(tmp_path, hook):
    (tmp_path / "train.py").write_text(f"import sys, samestep\n{hook}\nsamestep.world()\n", encoding="utf-8")
    environment = fresh_environment() | {"RANK": "5", "WORLD_SIZE": "2"}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = "samestep: error: RANK is 5 but WORLD_SIZE is 2: ranks count from 0, so RANK must be below WORLD_SIZE\n"
    assert (done.returncode, done.stderr) == ((1, "a hook of its own\n") if hook else (2, said))
