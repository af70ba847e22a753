from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samestep.checkpoints import directory as directories
from samestep.checkpoints.directory import CheckpointDirectory, RetentionPolicy
from samestep.errors import CheckpointError

HOLD = """
import sys, os
from pathlib import Path
from samestep.checkpoints.directory import CheckpointDirectory
directory = CheckpointDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path):
    opened = CheckpointDirectory(tmp_path / "runs" / "digits")
    yield opened
    opened.close()


def fill(directory, *names):
    for name in names:
        (directory.path / name).mkdir()


def test_checkpoints_are_ordered_by_step_then_by_number_of_the_save(directory):
    fill(directory, "step-00000010", "step-00000009", "step-00000010.10", "step-00000010.2", "step-123456789")
    assert directory.names() == [
        "step-00000009",
        "step-00000010",
        "step-00000010.2",
        "step-00000010.10",
        "step-123456789",
    ]


def test_foreign_names_are_no_checkpoints(directory):
    fill(directory, "step-7", "step-00000001.bad", ".step-00000001.tmp-00", "step-00000001.x", "best")
    assert directory.names() == []


def test_a_name_is_never_used_twice(directory):
    names = []
    for step in (5, 5, 6, 5):
        names.append(directory.fresh_name(step))
        fill(directory, names[-1])
    assert names == ["step-00000005", "step-00000005.1", "step-00000006", "step-00000005.2"]


def test_a_longer_number_that_begins_alike_is_another_step(directory):
    fill(directory, "step-100000000", "step-100000000.1")
    assert directory.fresh_name(10_000_000) == "step-10000000"


def test_pruning_leaves_the_newest_and_what_is_not_a_checkpoint(directory):
    fill(directory, "step-00000001", "step-00000002", "step-00000003", "step-00000001.bad", "mine")
    directory.prune(RetentionPolicy(2))
    assert directory.names() == ["step-00000002", "step-00000003"]
    assert {entry.name for entry in directory.path.iterdir() if not entry.name.startswith(".")} == {
        "step-00000001.bad",
        "step-00000002",
        "step-00000003",
        "mine",
    }


def test_pruning_fewer_than_are_kept_deletes_nothing(directory):
    fill(directory, "step-00000001")
    directory.prune(RetentionPolicy(2))
    assert directory.names() == ["step-00000001"]


def test_setting_aside_twice_takes_two_names(directory):
    for expected in ("step-00000004.bad", "step-00000004.bad-2"):
        fill(directory, "step-00000004")
        assert directory.quarantine("step-00000004") == expected


def test_leftovers_of_dead_runs_are_swept_at_the_next_start(tmp_path):
    first = CheckpointDirectory(tmp_path)
    (first.temporary("step-00000004") / "tensors.safetensors").write_text("half")
    fill(first, ".step-keep", "step-00000003")
    first.close()
    second = CheckpointDirectory(tmp_path)
    second.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", ".step-keep", "step-00000003"]


def test_a_live_run_on_the_directory_is_named_and_a_second_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "_GRACE_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=rf"in use by another run \(pid {other.pid} on .*end it") as caught:
            CheckpointDirectory(tmp_path)
        assert "\n" not in str(caught.value)
        other.kill()
        other.wait()
        CheckpointDirectory(tmp_path).close()  # the kernel dropped the lock of the killed run


def test_a_second_use_in_one_process_says_so(directory):
    with pytest.raises(CheckpointError, match=r"of this very process; close\(\)"):
        CheckpointDirectory(directory.path)


def test_a_closed_directory_can_be_used_again(directory):
    directory.close()
    CheckpointDirectory(directory.path).close()


@pytest.mark.parametrize("below", ["", "further/down"])
def test_a_path_that_is_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / below
    with pytest.raises(CheckpointError, match=rf"cannot keep checkpoints in {path}: .*is a file"):
        CheckpointDirectory(path)


def test_a_read_only_file_system_is_named():
    readonly = Path("/proc/self/samestep")
    with pytest.raises(CheckpointError, match=f"cannot keep checkpoints in {readonly}: "):
        CheckpointDirectory(readonly)
