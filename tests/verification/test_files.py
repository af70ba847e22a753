"""Every run of a script finds the files as the first run found them, and a verification leaves them so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import samestep
from samestep.launch.overlay import RESULT, VARIABLE
from samestep.verification.files import Files, written_folders

RESUMING = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

path = os.path.join(sys.argv[1], "snapshot.pt")
os.makedirs(sys.argv[1], exist_ok=True)
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists(path):
    first, state = torch.load(path)
    model.module.load_state_dict(state)
sampler = DistributedSampler(data)
for epoch in range(first, 2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save((epoch + 1, model.module.state_dict()), path)
        open(os.path.join(sys.argv[1], "log.txt"), "a").write(f"{epoch}\\n")
    dist.barrier()
dist.destroy_process_group()
"""

WRITING = """
import os, shutil, sys
from pathlib import Path
from samestep.verification.recording import writes
from samestep.verification.recording.writes import Writes
Writes.watch(%s)
writes.MOST_BYTES = 100
Path("old.txt").write_text("changed")
Path("removed.txt").unlink()
os.replace("moved.txt", "old2.txt")
os.replace("large.bin", "rotated.bin")
os.replace("rotated.bin", "rotated2.bin")
os.rename("checkpoint", "checkpoint.bak")
shutil.rmtree("dropped")
os.makedirs("made/below", exist_ok=True)
Path("made/below/new.txt").write_text("new")
Path("made/kept").mkdir()
with open("appended.txt", "a") as file:
    file.write("more")
Path("unread.txt").read_text()
"""


@pytest.mark.parametrize("place", ["kept", "elsewhere"], ids=["under the overlay", "outside of it"])
def test_a_script_that_saves_and_resumes_begins_anew_in_every_run_and_leaves_nothing(place, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(RESUMING)
    (tmp_path / "elsewhere").mkdir()
    where = "kept" if place == "kept" else str(tmp_path / "elsewhere" / "kept")
    monkeypatch.chdir(work)
    samestep.verify("train.py", where).require_same()
    assert [path.name for path in work.iterdir()] == ["train.py"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.fixture
def written(tmp_path):
    """Returns a folder in which a process has written, as WRITING says, once it has been restored."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("old.txt", "old2.txt", "removed.txt", "moved.txt", "appended.txt", "unread.txt"):
        (work / name).write_text(name)
    (work / "large.bin").write_bytes(b"l" * 101)
    for name in ("checkpoint", "dropped"):
        (work / name / "below").mkdir(parents=True)
        (work / name / "below" / "weights.pt").write_text(name)
    files = Files([], tmp_path / "store")
    with files.separate("run") as (variables, order):
        assert variables == {}
        subprocess.run([sys.executable, "-c", WRITING % order], cwd=work, check=True)
        assert (work / "old.txt").read_text() == "changed"
        (work / "made" / "kept" / "other.txt").write_text("of another program")
    return work, files


def test_what_python_writes_is_put_back_and_what_is_new_is_taken_away(written):
    work, files = written
    names = {path.name: path.read_text() for path in work.iterdir() if path.suffix == ".txt"}
    assert names == {
        name: name for name in ("old.txt", "old2.txt", "removed.txt", "moved.txt", "appended.txt", "unread.txt")
    }
    assert files.are_shared


def test_a_folder_that_the_script_has_removed_comes_back(written):
    work, _ = written
    assert (work / "dropped" / "below" / "weights.pt").read_text() == "dropped"


def test_what_was_moved_and_has_no_copy_is_never_taken_away(written):
    """A folder, and a file that is too large: they stay where the script has moved them, and that is told."""
    work, files = written
    assert (work / "checkpoint.bak" / "below" / "weights.pt").read_text() == "checkpoint"
    assert (work / "rotated2.bin").read_bytes() == b"l" * 101
    told = files.remark()
    assert told is not None
    assert "could not be put back" in told
    assert str(work / "checkpoint.bak") in told


def test_what_another_program_has_written_meanwhile_stays(written):
    work, _ = written
    assert [str(path.relative_to(work)) for path in sorted(work.rglob("*")) if "made" in str(path)] == [
        "made",
        "made/kept",
        "made/kept/other.txt",
    ]


def test_a_file_that_is_too_large_to_be_put_back_is_told(tmp_path):
    files = Files([], tmp_path / "store")
    with files.separate("run") as (_, order):
        note = {"path": str(tmp_path / "large.bin"), "kind": "old", "copy": None}
        (Path(order["written"]) / "a.json").write_text(json.dumps(note))
    assert files.remark() == (
        f"the script has changed or moved files that could not be put back: {tmp_path / 'large.bin'}"
    )


def test_folders_around_the_store_get_no_overlay(tmp_path):
    (tmp_path / "work").mkdir()
    files = Files([tmp_path, tmp_path / "work"], tmp_path / "store")
    assert files.folders == [tmp_path / "work"]
    with files.separate("run") as (variables, _):
        assert json.loads(variables[VARIABLE])["folders"] == [str(tmp_path / "work")]


def test_the_folders_are_where_it_runs_its_own_and_those_of_its_arguments(tmp_path, monkeypatch):
    for name in ("work", "scripts", "data", "out"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    words = [f"--data={tmp_path / 'data'}", str(tmp_path / "out"), "plain", str(tmp_path / "missing"), "--lr=0.1"]
    found = written_folders(words, tmp_path / "scripts" / "train.py")
    assert found == [tmp_path / name for name in ("work", "scripts", "data", "out")]


def test_a_run_under_an_overlay_sees_what_it_writes_and_changes_nothing(tmp_path):
    work = tmp_path / "work"
    (work / "mounted").mkdir(parents=True)
    (work / "old.txt").write_text("old")
    (work / "train.py").write_text(
        "import os\n"
        "open('old.txt', 'w').write('new'); open('made.txt', 'w').write('made')\n"
        "print(open('old.txt').read(), sorted(os.listdir('.')), os.environ.get('SAMESTEP_OVERLAY'))\n"
    )
    store = tmp_path / "store"
    overlay = {"folders": [str(work)], "store": str(store)}
    command = [sys.executable, "-m", "samestep", "run", "-n", "1", "--run-dir", str(tmp_path / "run"), "train.py"]
    environment = {**os.environ, VARIABLE: json.dumps(overlay)}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if why := (store / RESULT).read_text():
        pytest.skip(f"this kernel lets no overlay be mounted: {why}")
    assert done.returncode == 0, done.stderr
    assert "new ['made.txt', 'mounted', 'old.txt', 'train.py'] None" in done.stdout
    assert (work / "old.txt").read_text() == "old"
    assert sorted(path.name for path in work.iterdir()) == ["mounted", "old.txt", "train.py"]
