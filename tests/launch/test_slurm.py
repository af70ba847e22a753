"""Slurm itself starts ranks, tells them to make room, and takes the batch script."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster

from samestep.cli import main

HERE = [sys.executable, "-P", "-m", "samestep", "run"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(autouse=True)
def within(folder, monkeypatch):
    monkeypatch.chdir(folder.path)


MEET = """
join()
print(meet(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
"""


@pytest.mark.parametrize(
    ("tasks", "ranks", "size"),
    [
        (["-N2", "-n2"], [], 2),
        pytest.param(["-N2", "--ntasks-per-node=1"], ["-n", "2"], 4, marks=pytest.mark.prove),
        pytest.param(["-N2", "-n4"], [], 4, marks=pytest.mark.prove),
        pytest.param(["-N2", "-n3"], [], 3, marks=pytest.mark.prove),
    ],
)
def test_tasks_of_srun_are_ranks_or_bring_several(slurm, folder, tasks, ranks, size):
    done = slurm.run(["srun", *tasks, *HERE, *ranks, folder.script(MEET)])
    assert done.returncode == 0, done.stderr
    told = sorted(done.stdout.splitlines())
    assert told == [f"[rank {rank}] {size} {rank} {rank} {size}" for rank in range(size)]  # one machine in truth
    assert not list(folder.path.glob(".samestep-*"))


def test_every_task_leaves_with_the_culprits_code(slurm, folder):
    script = folder.script("join()\nmeet()\nsys.exit(7) if rank == 1 else meet()\ntime.sleep(600)")
    done = slurm.run(["srun", "-N2", "-n2", *HERE, "--json", "result.json", script])
    assert done.returncode == 7, done.stderr
    assert folder.result["failure"]["rank"] == 1


def test_a_script_that_srun_starts_by_itself_joins_over_two_nodes(slurm, folder):
    (folder.path / "train.py").write_text(
        "import samestep, torch, torch.distributed as dist\n"
        "with samestep.world() as world:\n"
        "    value = torch.ones(1)\n    dist.all_reduce(value)\n"
        "    print(world.rank, world.size, int(value))\n"
    )
    done = slurm.run(["srun", "-N2", "-n2", sys.executable, "train.py"])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 2", "1 2 2"]
    assert not list(folder.path.glob(".samestep-*"))


@pytest.mark.prove
def test_nothing_is_left_when_srun_is_killed(slurm, folder):
    from test_supervise import STAY, pids, wait_until_gone

    script = folder.script(STAY + "signal.pause()")
    process = slurm.start(["srun", "-N2", "-n2", *HERE, script])
    running = pids(folder, 2)
    process.kill()
    process.communicate()
    wait_until_gone(running)


TRAIN = """
import os, sys, time, torch, samestep
from torch.utils.data import TensorDataset
with samestep.world() as world:
    model = samestep.replicate(torch.nn.Linear(4, 1), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = samestep.shards(TensorDataset(torch.randn(64, 4)), world, batch_size=8)
    state = samestep.checkpoint("saved", world, every="1 h", model=model, optimizer=optimizer, data=batches)
    resumed = bool(state.resumed)
    for epoch in state.epochs(10**6 if not resumed else state.epoch + 1):
        for (x,) in batches:
            batches.mean(model(x).square().squeeze(1)).backward()
            optimizer.step(); optimizer.zero_grad()
            time.sleep(0.0 if resumed else 0.1)
            state.commit()
            open(f"at{world.rank}", "w").close()
    print("finished", resumed)
"""


def running_batch(slurm, folder, *words):
    """Queues a training, waits until both its ranks have taken a step; returns the job's number."""
    (folder.path / "train.py").write_text(TRAIN)
    command = [*HERE, "--slurm", "--nnodes", "2", "-n", "1", *words, "train.py"]
    done = slurm.run(command)
    assert done.returncode == 0, done.stderr
    while not all((folder.path / f"at{rank}").exists() for rank in range(2)):  # the test's own deadline ends this
        time.sleep(0.1)
    return re.match(r"job (\d+) is queued", done.stdout)[1]


def wait_for(slurm, job, wanted):
    """Waits until a job is in one of the wanted states; returns what Slurm tells of it."""
    while (told := slurm.job(job))["JobState"] not in wanted:
        time.sleep(0.2)  # Slurm has nothing to wait on
    return told


@pytest.mark.parametrize(  # as the warning comes; and to every process
    "where", [["--batch"], pytest.param([], marks=pytest.mark.prove)]
)
def test_a_batch_that_is_asked_to_make_room_is_queued_again_and_goes_on(slurm, folder, where):
    job = running_batch(slurm, folder)
    slurm.run(["scancel", *where, "--signal=USR1", job])
    assert wait_for(slurm, job, {"PENDING"})["Restarts"] == "1"
    (output,) = folder.path.glob(f"runs/*/slurm-{job}.out")
    assert "preempted by SIGUSR1: saved step" in output.read_text()
    wait_for(slurm, job, {"COMPLETED"})
    assert "resuming from saved/" in output.read_text()
    assert "finished True" in output.read_text()
    assert len(list(folder.path.glob("runs/*/run.json"))) == len(list(folder.path.glob("runs/*/again-1/run.json"))) == 1


@pytest.mark.prove
def test_a_job_of_higher_priority_makes_a_running_one_save(slurm, folder):
    job = running_batch(slurm, folder, "--sbatch-args", "--exclusive --partition=low")
    urgent = slurm.run(["srun", "-N2", "--exclusive", "true"])
    assert urgent.returncode == 0, urgent.stderr
    assert wait_for(slurm, job, {"PENDING", "RUNNING", "COMPLETED"})["Restarts"] == "1"
    (output,) = folder.path.glob(f"runs/*/slurm-{job}.out")
    assert "saved step" in output.read_text()
    slurm.run(["scancel", job])


WARNED = """
join()
meet()
if rank == 1:
    signal.signal(signal.SIGUSR1, lambda *_: open("warned", "w").close())
open(f"at{rank}", "w").close()
while not os.path.exists("enough"):
    time.sleep(0.05)
print("finished", meet())
"""


@pytest.mark.prove
def test_a_script_that_cannot_save_is_not_disturbed_by_the_warning_before_its_limit(slurm, folder):
    script = folder.script(WARNED)
    done = slurm.run([*HERE, "--slurm", "--nnodes", "2", "-n", "1", script])
    assert done.returncode == 0, done.stderr
    job = re.match(r"job (\d+) is queued; its output comes to (.*)\n", done.stdout)
    while not all((folder.path / f"at{rank}").exists() for rank in range(2)):  # the test's own deadline ends this
        time.sleep(0.1)
    slurm.run(["scancel", "--batch", "--signal=USR1", job[1]])
    while not (folder.path / "warned").exists():  # by who has a handler of its own, and has asked for it
        time.sleep(0.1)
    (folder.path / "enough").touch()
    told = wait_for(slurm, job[1], {"COMPLETED", "FAILED", "CANCELLED"})
    said = Path(job[2]).read_text()
    assert (told["JobState"], Path(job[2]).name) == ("COMPLETED", f"slurm-{job[1]}.out"), said
    assert said.count("finished 2") == 2, said


REQUEUE = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=2 --requeue --open-mode=append --output=out
srun -n2 {python} plain.py
[ "$SLURM_RESTART_COUNT" = 2 ] || scontrol requeue "$SLURM_JOB_ID"
"""


@pytest.mark.prove
def test_a_job_that_is_queued_again_starts_plain_ranks_on_the_same_node(slurm, folder, tmp_path_factory):
    """Its first run is killed, its second a clean one."""
    places = tmp_path_factory.mktemp("places")
    (folder.path / "plain.py").write_text(
        "import os, signal, samestep, torch, torch.distributed as dist\n"
        "count = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "with samestep.world() as world:\n"
        "    dist.barrier()\n"
        "    print('met', count, flush=True)\n"
        "    if count == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (folder.path / "job.sh").write_text(REQUEUE.format(python=sys.executable))
    words = ["sbatch", "--parsable", f"--export=ALL,TMPDIR={places}", "job.sh"]
    job = slurm.run(words).stdout.strip()
    wait_for(slurm, job, {"COMPLETED", "FAILED", "CANCELLED"})
    said = (folder.path / "out").read_text()
    assert [said.count(f"met {count}") for count in range(3)] == [2, 2, 2], said
    assert not list(places.glob("samestep-*/*"))


def test_the_batch_script_is_shown_and_quoted(folder, capfd):
    words = ["--slurm", "--dry-run", "--nnodes", "3", "-n", "4", "--restarts", "2"]
    words += ["--sbatch-args", "--time=1:00:00 --nodes=5"]
    assert main(["run", *words, folder.script(""), "--name", "two words; $HOME"]) == 0
    script = capfd.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    assert "#SBATCH --time=1:00:00 --nodes=5\n" in script
    assert "run -n 4 --restarts 2" in script
    assert "train.py --name 'two words; $HOME'" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert not (folder.path / "runs").exists()


def test_a_machine_without_slurm_says_so(folder, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(["run", "--slurm", folder.script("")]) == 2
    assert "there is no sbatch here: submit on a host of the cluster" in capfd.readouterr().err


def test_what_would_begin_another_line_of_the_script_is_refused(folder, capfd):
    assert main(["run", "--slurm", "--dry-run", "--sbatch-args", "--comment=a\nrm -rf /", folder.script("")]) == 2
    assert "cannot stand in a job script" in capfd.readouterr().err


OVER_MPI = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(dist.get_backend(), dist.get_rank(), dist.get_world_size(), x.tolist())
"""


@pytest.mark.prove
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py: pip install 'samestep[mpi]'")
def test_tasks_of_srun_speak_mpi_to_each_other(slurm, folder):
    done = slurm.run(["srun", "--mpi=pmi2", "-N2", "-n3", *HERE, folder.script(OVER_MPI)])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] mpi {rank} 3 [6.0, 6.0, 6.0]" for rank in range(3)]
