"""The batch script on a real Slurm: exit codes, requeues and preemption, with a program that stands for samestep."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass

import pytest
from slurm_cluster import slurm_cluster

from samestep.errors import UsageError
from samestep.launch.hosts.slurm import SCRIPT, BatchJob, batch_script, submit, warning_for
from samestep.rankenv import variable

OVER = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Its srun ends a step at the first bad exit code, as on many clusters: the job must not depend on that."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), gpus=True, kill_on_bad_exit=True) as built:
        yield built


@pytest.fixture
def here(cluster, monkeypatch):
    for name, value in cluster.environment.items():
        if variable(name) != value:
            monkeypatch.setenv(name, value)
    return cluster


class StandIn:
    """A program that stands where `python -m samestep` does; writes down its arguments, each ended by a zero."""

    def __init__(self, folder, body=""):
        self.path = folder / "stand-in"
        self.told = folder / "told"
        self.path.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >{shlex.quote(str(self.told))}-$SLURM_PROCID\n{body}\n')
        self.path.chmod(0o755)
        subprocess.run(["mkfifo", folder / "pipe"], check=True)  # to wait at: nobody ever writes to it

    def arguments(self, task=0):
        return (self.told.parent / f"told-{task}").read_text().split("\0")[:-1]


@dataclass(frozen=True, kw_only=True)
class Job(BatchJob):
    """A job whose script starts `python`."""

    python: str = sys.executable


def script_of(job):
    return batch_script(job).replace(f"{shlex.quote(sys.executable)} -P", f"{shlex.quote(job.python)} -P")


def batch(folder, *program, **more):
    known = {"directory": folder, "run_dir": folder / "run"}
    return Job(program=program or ("train.py",), **{**known, **more})


def end_of(cluster, number):
    while (said := cluster.job(number)).get("JobState") not in OVER:
        time.sleep(0.05)  # the test's own deadline ends this
    return said


def run_to_its_end(cluster, job):
    """Returns the exit code and the output of a job, and how often it was queued again."""
    number = submit(script_of(job), job.run_dir)
    said = end_of(cluster, number)
    code = int(said["ExitCode"].partition(":")[0])
    return code, (job.run_dir / f"slurm-{number}.out").read_text(), int(said["Restarts"])


def test_the_script_reads_as_a_person_would_write_it(tmp_path):
    job = BatchJob(
        program=("train.py", "--lr", "0.1"),
        directory=tmp_path / "folder",
        run_dir=tmp_path / "folder/runs/train",
        options=("--restarts", "3", "--json", "result.json"),
        nodes=2,
        ranks=4,
        sbatch_args="#SBATCH --account=physics --exclusive",
    )
    expected = """\
    #!/bin/bash
    #SBATCH --job-name=train
    #SBATCH --nodes=2
    #SBATCH --ntasks-per-node=1
    #SBATCH --cpus-per-task=4
    #SBATCH --signal=B:USR1@60
    #SBATCH --requeue
    #SBATCH --open-mode=append
    #SBATCH --output=FOLDER/folder/runs/train/slurm-%j.out
    #SBATCH --account=physics --exclusive

    cd FOLDER/folder || exit 2

    # a run directory holds one run: what is queued again, or submitted once more, gets a folder of its own in it
    again=${SLURM_RESTART_COUNT:+/again-$SLURM_RESTART_COUNT}
    if [ -e FOLDER/folder/runs/train"$again/run.json" ]; then again=/again-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}; fi

    # the warning before the time limit: for the process that leads the run, and no other
    leader=FOLDER/folder/runs/train/leader-$SLURM_JOB_ID
    warned=
    trap 'warned=1; kill -USR1 "$(cat "$leader")"' USR1

    # one task on each node, with all of its cores and GPUs; each leaves with the exit code of the whole run
    srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none \\
        bash -c '[ "$SLURM_PROCID" != 0 ] || echo $$ >"$0"; exec "$@"' "$leader" \\
        PYTHON -P -m samestep run -n 4 --restarts 3 --json result.json \\
        --run-dir FOLDER/folder/runs/train"$again" \\
        train.py --lr 0.1 &
    wait $!
    code=$?
    while [ -n "$warned" ]; do # it was the warning that ended the wait
        warned=
        wait $!
        code=$?
    done
    rm -f "$leader"

    if [ "$code" -eq 75 ]; then # every rank has saved: go on from there when there is room again
        scontrol requeue "$SLURM_JOB_ID" || echo REFUSED >&2
    fi
    exit "$code"
    """
    refused = f"'saved, but not queued again; to go on: sbatch {tmp_path}/folder/runs/train/samestep.sbatch'"
    filled = (
        textwrap.dedent(expected)
        .replace("REFUSED", refused)
        .replace("PYTHON", sys.executable)
        .replace("FOLDER", str(tmp_path))
    )
    assert batch_script(job) == filled


def test_what_is_not_asked_for_is_left_to_the_cluster(tmp_path):
    script = batch_script(batch(tmp_path, "-m", "package.train", ranks=3))
    assert "#SBATCH --cpus-per-task=3\n" in script
    assert not [word for word in ("--time=", "--partition", "--gres", "--restarts", "--export") if word in script]
    assert f"{sys.executable} -P -m samestep run -n 3 \\" in script
    assert script.count("--cpus-per-task") == 1  # srun gives the task all that the job has on the node


def test_sbatch_accepts_the_script(here, tmp_path):
    job = batch(tmp_path, nodes=2, ranks=4, sbatch_args="--gres=gpu:2 --time=10 --partition=low --comment='two words'")
    command = ["sbatch", "--test-only"]
    done = subprocess.run(command, input=batch_script(job), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "using 8 processors on nodes m[1-2] in partition low" in done.stderr


def test_names_and_arguments_come_through_as_they_are(here, tmp_path):
    folder = tmp_path / 'it\'s 100% "mine" $HOME'
    folder.mkdir()
    words = ["a b", "$HOME `id`", 'q"q', "it's", "*", "line\nbreak", "", "\\", "é", "%j"]
    stand_in = StandIn(folder)
    job = batch(folder, "my train.py", *words, ranks=1, python=str(stand_in.path))
    code, said, _ = run_to_its_end(here, job)
    assert code == 0, said
    run = ["-P", "-m", "samestep", "run", "-n", "1", "--run-dir", str(folder / "run")]
    assert stand_in.arguments() == [*run, "my train.py", *words]


@pytest.mark.parametrize(("grace", "warning"), [(0, 60), (30, 60), (31, 61), (120.5, 151), (1e6, 65_535)])
def test_the_warning_comes_early_enough_for_the_grace(tmp_path, grace, warning):
    script = batch_script(batch(tmp_path, warning=warning_for(grace)))
    assert f"#SBATCH --signal=B:USR1@{warning}\n" in script


def test_variables_go_along_by_name(here, tmp_path, monkeypatch):
    monkeypatch.setenv("NAMED", "a secret")
    stand_in = StandIn(tmp_path, 'echo "is $NAMED"')
    job = batch(tmp_path, python=str(stand_in.path), variables=("NAMED",))
    code, said, _ = run_to_its_end(here, job)
    assert (code, "is a secret\n" in said) == (0, True), said
    assert "a secret" not in (job.run_dir / SCRIPT).read_text()


@pytest.mark.parametrize("field", ["program", "sbatch_args"])
def test_a_line_break_cannot_smuggle_an_option_in(tmp_path, field):
    text = "x\n#SBATCH --uid=0"
    job = batch(tmp_path, text) if field == "program" else batch(tmp_path, sbatch_args=text)
    with pytest.raises(UsageError, match="leave line breaks and control characters out"):
        batch_script(job)


@pytest.mark.prove  # as test_slurm has it with a training
def test_a_job_that_has_saved_is_queued_again_and_goes_on(here, tmp_path):
    stand_in = StandIn(tmp_path, 'echo "start ${SLURM_RESTART_COUNT:-0}"; [ -n "$SLURM_RESTART_COUNT" ] || exit 75')
    code, said, restarts = run_to_its_end(here, batch(tmp_path, nodes=2, python=str(stand_in.path)))
    assert (code, restarts) == (0, 1)
    assert [line for line in said.splitlines() if line.startswith("start")] == ["start 0"] * 2 + ["start 1"] * 2
    assert str(tmp_path / "run/again-1") in stand_in.arguments()


def test_the_script_is_kept_and_may_be_submitted_once_more(here, tmp_path):
    run = 'while [ $# -gt 1 ] && [ "$1" != --run-dir ]; do shift; done; mkdir -p "$2"; [ ! -e "$2/run.json" ] || exit 2'
    job = batch(tmp_path, python=str(StandIn(tmp_path, f'{run}; touch "$2/run.json"').path))
    assert run_to_its_end(here, job)[0] == 0
    assert (job.run_dir / SCRIPT).read_text() == script_of(job)
    number = here.run(["sbatch", "--parsable", str(job.run_dir / SCRIPT)]).stdout.strip()
    assert end_of(here, number)["ExitCode"] == "0:0"
    assert (job.run_dir / f"again-{number}-0" / "run.json").exists()


def test_what_cannot_be_queued_again_says_how_to_go_on(here, tmp_path):
    stand_in = StandIn(tmp_path, "exit 75")
    broken = tmp_path / "scontrol"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    job = batch(tmp_path, python=str(stand_in.path))
    script = script_of(job).replace("scontrol requeue", f"{broken} requeue")
    number = submit(script, job.run_dir)
    assert end_of(here, number)["ExitCode"] == "75:0"
    assert f"to go on: sbatch {job.run_dir}/samestep.sbatch" in (job.run_dir / f"slurm-{number}.out").read_text()


@pytest.mark.prove
def test_tasks_that_leave_one_after_the_other_with_75_are_queued_again_too(here, tmp_path):
    """Where srun ended the others at the first 75, its own code would be 143."""
    late = f"until [ -e {tmp_path}/gone ]; do read -r -t 0.1 <> {tmp_path}/pipe; done; read -r -t 1 <> {tmp_path}/pipe"
    first = f"touch {tmp_path}/gone"
    body = f'[ -n "$SLURM_RESTART_COUNT" ] && exit 0; if [ $SLURM_PROCID = 1 ]; then {first}; else {late}; fi; exit 75'
    code, said, restarts = run_to_its_end(here, batch(tmp_path, nodes=2, python=str(StandIn(tmp_path, body).path)))
    assert (code, restarts) == (0, 1), said


@pytest.mark.prove
def test_a_preempted_job_saves_and_goes_on_when_there_is_room(here, tmp_path):
    body = f"""
    [ -n "$SLURM_RESTART_COUNT" ] && exit 0
    trap 'echo saved $SLURM_PROCID; exit 75' TERM
    touch {tmp_path}/begun-$SLURM_PROCID
    while :; do read -r -t 60 <> {tmp_path}/pipe; done
    """
    job = batch(tmp_path, nodes=2, sbatch_args="--partition=low --exclusive", python=str(StandIn(tmp_path, body).path))
    number = submit(script_of(job), job.run_dir)
    while not all((tmp_path / f"begun-{task}").exists() for task in range(2)):
        time.sleep(0.02)  # the test's own deadline ends this
    urgent = here.run(["srun", "-N2", "--exclusive", "hostname"])
    assert urgent.returncode == 0, urgent.stderr
    said = end_of(here, number)
    output = (job.run_dir / f"slurm-{number}.out").read_text()
    assert (said["ExitCode"], said["Restarts"]) == ("0:0", "1"), output
    assert sorted(line for line in output.splitlines() if line.startswith("saved")) == ["saved 0", "saved 1"]


def test_a_warning_reaches_the_process_that_leads_and_no_other(here, tmp_path):
    """Again and again, and the code is still what it ends with."""
    body = f"""
    trap 'echo warned $SLURM_PROCID; touch {tmp_path}/warned-$((n += 1))' USR1
    touch {tmp_path}/begun-$SLURM_PROCID
    while [ ! -e {tmp_path}/enough ]; do read -r -t 0.1 <> {tmp_path}/pipe; done
    exit 9
    """
    job = batch(tmp_path, nodes=2, python=str(StandIn(tmp_path, body).path))
    number = submit(script_of(job), job.run_dir)
    signs = [tmp_path / "begun-0", tmp_path / "begun-1", tmp_path / "warned-1", tmp_path / "warned-2"]
    for wanted in (signs[:2], signs[2:3], signs[3:]):
        while not all(sign.exists() for sign in wanted):
            time.sleep(0.02)  # the test's own deadline ends this
        if wanted != signs[3:]:
            here.run(["scancel", "--batch", "--signal=USR1", number])
    (tmp_path / "enough").touch()
    said = end_of(here, number)
    output = (job.run_dir / f"slurm-{number}.out").read_text()
    assert said["ExitCode"] == "9:0", output
    assert [line for line in output.splitlines() if line.startswith("warned")] == ["warned 0"] * 2
    assert not list(job.run_dir.glob("leader-*"))


def test_a_task_that_never_comes_so_far_ends_the_others(here, tmp_path):
    body = f"[ $SLURM_PROCID = 1 ] && exit 3; while :; do read -r -t 60 <> {tmp_path}/pipe; done"
    job = batch(tmp_path, nodes=2, wait=1, python=str(StandIn(tmp_path, body).path))
    code, said, restarts = run_to_its_end(here, job)
    assert code != 0
    assert restarts == 0
    assert "task 1: Exited with exit code 3" in said


TRAIN = """\
import os, sys
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK")), flush=True)
if os.environ["RANK"] == "3":
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.prove), 7])
def test_the_ranks_of_all_nodes_are_one_run_and_its_exit_code_is_the_jobs(here, tmp_path, code):
    (tmp_path / "train.py").write_text(TRAIN)
    ended, said, _ = run_to_its_end(here, batch(tmp_path, "train.py", str(code), nodes=2, ranks=2))
    assert ended == code, said
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["ranks"], record["exit"]) == (4, code)
    assert all(f"[rank {rank}] {rank} 4 " in said for rank in range(4)), said


def test_a_refusal_of_sbatch_is_passed_on_in_one_line(here, tmp_path):
    with pytest.raises(UsageError) as refused:
        submit(batch_script(batch(tmp_path, sbatch_args="--partition=nowhere")), tmp_path / "runs" / "one")
    assert str(refused.value).startswith("sbatch refuses the job: invalid partition specified: nowhere")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/run cannot be written: Not a directory"):
        submit("", tmp_path / "file" / "run")
