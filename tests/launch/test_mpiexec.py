"""A real mpiexec starts ranks, with `samestep run` or without, and never hangs when one of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli import main

MPIEXEC = Path(sys.executable).with_name("mpiexec")
RUN = [sys.executable, "-P", "-m", "samestep", "run"]
pytestmark = pytest.mark.skipif(
    not MPIEXEC.exists(), reason="no mpiexec beside this Python: pip install mpich brings one"
)


def mpiexec(folder, count, *words):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PMI", "MPI", "GLOO", "OMP"))
    }
    command = [MPIEXEC, "-n", count, *words]
    return subprocess.run(
        list(map(str, command)),
        cwd=folder.path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


MEET = """
join()
print(meet(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
"""


@pytest.mark.parametrize(
    ("tasks", "words", "size"), [pytest.param(2, [], 2, marks=pytest.mark.prove), (2, ["-n", "2"], 4)]
)
def test_tasks_are_ranks_or_bring_several(folder, tasks, words, size):
    done = mpiexec(folder, tasks, *RUN, *words, folder.script(MEET))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {size} {rank} {rank} {size}" for rank in range(size)]


def test_the_culprit_is_named_and_all_tasks_leave_with_its_code(folder):
    script = folder.script("join()\nmeet()\nsys.exit(7) if rank == 1 else meet()\ntime.sleep(600)")
    done = mpiexec(folder, 2, *RUN, "--json", "result.json", script)
    assert done.returncode == 7, done.stderr
    assert folder.result["failure"]["rank"] == 1


@pytest.mark.prove
@pytest.mark.parametrize("busy", ["dist.barrier()", "threading.Event().wait()"])
def test_mpiexec_itself_ends_when_a_rank_of_a_plain_script_raises(folder, busy):
    """Whether the others have lost it, or are told to leave: mpiexec passes on what all codes have in common."""
    (folder.path / "train.py").write_text(
        "import samestep, threading, torch.distributed as dist\n"
        "with samestep.world() as world:\n"
        "    if world.rank == 1:\n        raise ValueError('alone')\n"
        f"    {busy}\n"
    )
    done = mpiexec(folder, 2, sys.executable, "train.py")
    assert done.returncode == 1
    assert "ValueError: alone" in done.stderr


def test_mpi_without_its_package_is_said_once_and_before_mpiexec(folder, monkeypatch, capsys):
    monkeypatch.setattr("samestep.cli.run.find_spec", lambda name: None)
    assert main(["run", "--mpi", "-n", "4", str(folder.path / folder.script("join()"))]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "mpi4py, which is not installed here: pip install 'samestep[mpi]' brings it" in said
