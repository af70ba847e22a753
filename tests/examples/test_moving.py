"""Moving over: the page shows what the files are, and after the move any number of ranks train as one process."""

from __future__ import annotations

import difflib
import functools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from gallery import ROOT, TOGETHER, main_of, run, run_on_ranks

pytestmark = pytest.mark.timeout(600)  # the first that asks for a way waits for its runs
MOVING = ROOT / "examples" / "moving"
FROM = sorted(folder.name for folder in MOVING.iterdir() if (folder / "after.py").exists())
BEFORE = {"plain": 1, "torchrun": 2, "data_parallel": 1, "accelerate": 2, "fabric": 2}  # on so many ranks it runs
MODULES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}  # what it needs beside torch
INSTALLED = {name: ranks for name, ranks in BEFORE.items() if find_spec(MODULES.get(name, "torch"))}
NEVER_RUN = {"horovod"}  # it comes as source alone
PAGE = ROOT / "docs" / "moving.md"
CHINESE = ROOT / "docs" / "zh" / "moving.md"


def on(ranks, script):
    """Runs a script on so many ranks; returns its final loss."""
    launcher = [] if ranks == 1 else ["-P", "-m", "samestep", "run", "-n", str(ranks)]
    process = run([sys.executable, *launcher, str(script)])
    assert process.returncode == 0, process.stderr
    return final_loss(process.stdout)


def final_loss(text):
    """The loss that a script has printed, once."""
    (loss,) = re.findall(r"final loss (\d\.\d{6})", text)
    return float(loss)


@functools.cache
def losses(name):
    """The final losses of `after.py` by ranks, and that of `before.py` as 0 where it runs."""
    runs = {ranks: (ranks, MOVING / name / "after.py") for ranks in (1, 2)}
    if name in INSTALLED:
        runs[0] = INSTALLED[name], MOVING / name / "before.py"
    with ThreadPoolExecutor(TOGETHER) as pool:
        return dict(zip(runs, pool.map(lambda run: on(*run), runs.values()), strict=True))


def test_there_is_a_way_from_each():
    assert FROM == ["accelerate", "data_parallel", "fabric", "horovod", "plain", "torchrun"]


@pytest.mark.parametrize("page", [PAGE, CHINESE], ids=["English", "Chinese"])
@pytest.mark.parametrize("name", FROM)
def test_the_page_shows_the_difference_between_the_files(name, page):
    before, after = ((MOVING / name / f"{side}.py").read_text(encoding="utf-8") for side in ("before", "after"))
    paths = [f"examples/moving/{name}/{side}.py" for side in ("before", "after")]
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), paths[0], paths[1], n=1)
    assert f"```diff\n{''.join(lines)}```\n" in page.read_text(encoding="utf-8")


def test_the_pages_script_agrees():
    command = [sys.executable, str(ROOT / "scripts" / "moving.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_what_is_never_run_compiles_and_the_page_says_so():
    assert {*FROM} - {*BEFORE} == NEVER_RUN
    compile((MOVING / "horovod" / "before.py").read_text(encoding="utf-8"), "horovod", "exec")
    assert "Horovod is distributed as source only" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["plain", "torchrun"])
def test_after_the_move_ranks_that_are_there_come_to_one_process_loss(name, two_ranks, tmp_path):
    script = MOVING / name / "after.py"
    alone = final_loss(main_of(str(script), [], str(tmp_path)))
    assert final_loss(run_on_ranks(two_ranks, script, [], tmp_path)) == pytest.approx(alone, abs=1e-4)
    assert alone < 0.8


@pytest.mark.prove
@pytest.mark.usefixtures("fork_server")  # started before the threads of `losses` ask for it
@pytest.mark.parametrize("name", FROM)
def test_after_the_move_two_ranks_come_to_one_process_loss(name):
    assert losses(name)[2] == pytest.approx(losses(name)[1], abs=1e-4)  # float32, 48 steps
    assert losses(name)[1] < 0.8


@pytest.mark.prove
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("name", BEFORE)
def test_before_the_move_it_learns_too(name):
    if name not in INSTALLED:
        pytest.skip(f"{MODULES[name]} is not installed, whose own script this is; after.py is run all the same")
    assert losses(name)[0] < 0.8
