"""What goes wrong with a directory in real life, by real means: the run is told in one line, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
from saved import a_model, train

import samestep
from samestep.checkpoints.directory import CheckpointDirectory
from samestep.checkpoints.integrity import verify
from samestep.errors import CheckpointError

NOBODY = 65534


def test_a_disk_that_fills_up_costs_that_save_and_not_the_training(small_disk, capfd):
    with samestep.world(device="cpu") as world:
        model = a_model()
        state = samestep.checkpoint(small_disk / "run", world, keep=9, model=model)
        first = state.save()
        with (small_disk / "other").open("wb") as file:
            file.write(bytes(shutil.disk_usage(small_disk).free))
        with pytest.raises(CheckpointError, match=rf"disk full at {small_disk}/run: needs 2\d\.\d kB, free 0 B"):
            state.save()
        assert sorted(entry.name for entry in (small_disk / "run").iterdir() if "step" in entry.name) == [first.name]
        verify(first)
        (small_disk / "other").unlink()
        verify(state.save())


@pytest.fixture
def as_nobody(tmp_path):
    return partial(run_as_nobody, tmp_path / "script.py")


def run_as_nobody(file, script, *arguments, before=""):
    """Runs a script as a user without rights; one that has none anyway stays who he is. `before` is run with them."""
    drop = f"import os\nif os.getuid() == 0: os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    head = "import sys\nfrom pathlib import Path\nfrom samestep.errors import CheckpointError\n"
    head += "from samestep.checkpoints.directory import CheckpointDirectory\n"
    file.write_text(head + before + drop + textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, str(file), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = """
    try:
        directory = CheckpointDirectory(Path(sys.argv[1]))
        print(latest_intact(directory))
    except CheckpointError as error:
        print("refused:", error)
"""


@pytest.fixture
def reachable():
    """A directory that anybody may look into, unlike pytest's."""
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="samestep-test-", dir="/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_directory_that_may_not_be_written_is_named(as_nobody, reachable, mode):
    path = reachable / "run"
    path.mkdir()
    path.chmod(mode)
    assert as_nobody(OPEN, path) == f"refused: cannot keep checkpoints in {path}: permission denied\n"
    path.chmod(0o755)


def test_a_parent_in_which_nothing_may_be_made_is_named(as_nobody, reachable):
    reachable.chmod(0o755)
    if os.getuid() != 0:
        reachable.chmod(0o555)
    path = reachable / "run"
    assert as_nobody(OPEN, path) == f"refused: cannot keep checkpoints in {path}: permission denied\n"


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_damaged(as_nobody, reachable):
    path = reachable / "run"
    train(path, steps=2)
    newest = path / "step-00000002"
    for entry in [path, *path.rglob("*")]:
        entry.chmod(0o777)
    (newest / "tensors.safetensors").chmod(0o000)
    imports = "from samestep.checkpoints.integrity import latest_intact\n"  # he may not read the interpreter's files
    shown = as_nobody(OPEN, path, before=imports)
    assert shown == f"refused: {newest}/tensors.safetensors may not be read: permission denied\n"
    (newest / "tensors.safetensors").chmod(0o644)
    verify(newest)


LIMITED = """
    import resource, signal, sys
    from pathlib import Path
    import torch
    from samestep.errors import CheckpointError
    from samestep.checkpoints.directory import CheckpointDirectory
    from samestep.checkpoints.encoder import Encoder
    from samestep.checkpoints.manifest import SCHEMA, Manifest
    from samestep.checkpoints.writer import write

    def save(step, count):
        encoder = Encoder()
        state = {"model": encoder.encode({"weight": torch.ones(count)}, "model")}
        return write(directory, Manifest(SCHEMA, step, 0, 1, "1", "2", {}, state, None), encoder.tensors)

    directory = CheckpointDirectory(Path(sys.argv[1]))
    save(1, 1000)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(2, 100_000)
    except CheckpointError as error:
        print(error)
    save(3, 2000)
"""


def test_a_limit_on_the_size_of_files_costs_that_save_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(LIMITED))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"cannot save {tmp_path}/run/step-00000002: " in done.stdout
    assert "too large" in done.stdout
    left = sorted(entry.name for entry in (tmp_path / "run").iterdir() if "step" in entry.name)
    assert left == ["step-00000001", "step-00000003"]
    for name in left:
        verify(tmp_path / "run" / name)


def test_a_directory_that_vanishes_is_an_error_of_the_next_save(tmp_path):
    with samestep.world(device="cpu") as world:
        state = samestep.checkpoint(tmp_path / "run", world, model=a_model())
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(CheckpointError, match=f"cannot look into {tmp_path}/run: it is no longer there"):
            state.save()


def test_another_run_in_the_directory_is_told_by_what_differs(tmp_path):
    train(tmp_path / "run", steps=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with samestep.world(device="cpu") as world, pytest.raises(CheckpointError) as caught:
        samestep.checkpoint(tmp_path / "run", world, model=a_model().double(), optimizer=torch_sgd(a_model()))
    lines = str(caught.value).splitlines()
    assert "does not fit, nothing was loaded" in lines[0]
    assert "  data: in the checkpoint, not named here; name it, as in checkpoint(…, data=…)" in lines
    assert any("model.0.bias: float32 [40] in the checkpoint, float64 [40] in the model" in line for line in lines)
    assert len(lines) <= 8
    assert all(path.read_bytes() == data for path, data in before.items() if "step" in str(path))


def torch_sgd(model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("what", ["file", "link"])
def test_what_stands_where_an_unfinished_save_would_is_swept_and_what_it_leads_to_stays(tmp_path, what):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("mine")
    leftover = tmp_path / "run" / ".step-00000001.tmp-00"
    if what == "file":
        leftover.write_text("")
    else:
        leftover.symlink_to(tmp_path / "precious")
    CheckpointDirectory(tmp_path / "run").close()
    assert not leftover.is_symlink()
    assert not leftover.exists()
    assert (tmp_path / "precious" / "data").read_text() == "mine"
