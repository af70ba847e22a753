"""Slurm: the job that `samestep run --slurm` submits.

    sbatch script          on the first node, one job
      srun                 one task on each node: `samestep run -n K`, which starts the K ranks of its node
        task 0             leads; the others come to it (samestep.launch.meeting)
      exit code 75         every rank has saved: the job is queued again, under the same number
      any other            the job's own, which is the culprit's

torchrun on Slurm needs an address, a port and a rendezvous number in the script, and its users write them by hand.

Every task leaves with the exit code of the run, so srun, which returns the highest of its tasks' codes, returns that.
With --kill-on-bad-exit=1 it would not: the first task to leave with 75 makes srun end the others with SIGTERM while
they are on their way out, and 143 is higher. samestep ends the ranks of a run that has failed by itself, so srun
has only to see to a task that never came so far: --wait.

USR1 comes some time before the limit (--signal=B:), to the batch script alone, which tells the process that leads the
run. Sent to the tasks, it would reach every process in them, and end what does not handle it: the workers of a
DataLoader, and ranks that cannot save. Those are left to train on to their limit.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UsageError
from samestep.files import write_private

__all__: list[str] = []

WARNING = 60  # seconds before the time limit at which the ranks are asked to save; Slurm may be a minute early
AFTERWARDS = 30.0  # seconds that are left when a save has taken all of its grace
LONGEST = 65_535  # seconds that sbatch takes
SCRIPT = "samestep.sbatch"  # what is submitted, in the run directory
LEAVE_TIME_S = 60  # seconds for the other tasks to end when one has


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a job is to be.

    Attributes:
        program: the script, or `-m` and the module, and its arguments.
        directory: where it runs; all nodes must see it.
        run_dir: where the run's files and the job's output go; all nodes must see it.
        options: of `samestep run`, beside those that stand here by themselves.
        nodes: how many.
        ranks: on each node; one per GPU by default, else one.
        gpus: on each node.
        cpus: on each node; by default one for each rank.
        time: limit, as sbatch takes it: "2:00:00", "1-12", "90" (minutes).
        partition: where it queues; the cluster's default if not given.
        name: of the job; the program's by default.
        more: further options of sbatch, such as "--account=physics"; they win over the others.
        restarts: after failures, within the job.
        python: the interpreter, on all nodes; this one by default.
        wait: seconds that other tasks may stay when one has left; 0 is for ever, which `--lost-host continue` and
            `wait` need.
        variables: names of those that go along.
        warning: seconds before the time limit at which the ranks are asked to save.
    """

    program: tuple[str, ...]
    directory: Path
    run_dir: Path
    options: tuple[str, ...] = ()
    nodes: int = 1
    ranks: int | None = None
    gpus: int = 0
    cpus: int | None = None
    time: str | None = None
    partition: str | None = None
    name: str | None = None
    more: tuple[str, ...] = ()
    restarts: int = 0
    python: str | None = None
    wait: int = LEAVE_TIME_S
    variables: tuple[str, ...] = ()
    warning: int = WARNING

    @property
    def script(self) -> Path:
        """Where the script is kept, to be submitted once more."""
        return self.run_dir / SCRIPT

    @property
    def ranks_per_node(self) -> int:
        """How many ranks each task starts."""
        return self.ranks or self.gpus or 1


def warning_for(grace: float) -> int:
    """Returns how many seconds before its limit a job must be warned whose ranks may take `grace` seconds to save."""
    return min(LONGEST, max(WARNING, math.ceil(grace + AFTERWARDS)))


def batch_script(job: Batch) -> str:
    """Returns the script that sbatch takes.

    Raises:
        UsageError: something in it cannot stand on a line of a script.
    """
    header = "\n".join(f"#SBATCH {line}" for line in _header(job))
    return f"#!/bin/bash\n{header}\n\n{_body(job)}"


def _header(job: Batch) -> Iterator[str]:
    """Yields the options of sbatch."""
    name = job.name or Path(job.program[1] if job.program[0] == "-m" else job.program[0]).stem
    yield from _option("job-name", name)
    yield from _option("partition", job.partition)
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={job.cpus or job.ranks_per_node}"
    if job.gpus:
        yield f"--gres=gpu:{job.gpus}"
    yield from _option("time", job.time)
    yield f"--signal=B:USR1@{job.warning}"
    yield "--requeue"
    yield "--open-mode=append"
    yield from _option("output", f"{job.run_dir}/".replace("%", "%%") + "slurm-%j.out")
    if job.variables:  # names alone: anybody may read the script
        yield f"--export=ALL,{','.join(job.variables)}"
    yield from (_line(option.removeprefix("#SBATCH").strip()) for option in job.more)


def _option(name: str, value: str | None) -> Iterator[str]:
    if value is not None:
        yield f"--{name}={shlex.quote(_line(value))}"


def _line(text: str) -> str:
    """Returns `text`, which must not begin another line: that one would be obeyed too."""
    if not text.isprintable():
        raise UsageError(f"{text!r} cannot stand in a job script: leave line breaks and control characters out")
    return text


BODY = """\
cd {directory} || exit 2

# a run directory holds one run: what is queued again, or submitted once more, gets a folder of its own in it
again=${{SLURM_RESTART_COUNT:+/again-$SLURM_RESTART_COUNT}}
if [ -e {run_dir}"$again/run.json" ]; then again=/again-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}; fi

# the warning before the time limit: for the process that leads the run, and no other
leader={leader}-$SLURM_JOB_ID
warned=
trap 'warned=1; kill -USR1 "$(cat "$leader")"' USR1

# one task on each node, with all of its cores and GPUs; each leaves with the exit code of the whole run
{command} &
wait $!
code=$?
while [ -n "$warned" ]; do # it was the warning that ended the wait
    warned=
    wait $!
    code=$?
done
rm -f "$leader"

if [ "$code" -eq 75 ]; then # every rank has saved: go on from there when there is room again
    scontrol requeue "$SLURM_JOB_ID" || echo {refused} >&2
fi
exit "$code"
"""


LEAD = '[ "$SLURM_PROCID" != 0 ] || echo $$ >"$0"; exec "$@"'  # task 0 is on the node of the batch script


def _body(job: Batch) -> str:
    run = ["-n", str(job.ranks or job.gpus or "auto"), *(["--restarts", str(job.restarts)] if job.restarts else [])]
    lines = [
        ["srun", "--kill-on-bad-exit=0", f"--wait={job.wait}", "--cpu-bind=none", *_srun_cpus(job)],
        ["bash", "-c", LEAD],
        [job.python or sys.executable, "-P", "-m", "samestep", "run", *run, *job.options],
        ["--run-dir", str(job.run_dir)],
        list(job.program),
    ]
    quoted = [shlex.join(line) for line in lines]
    quoted[1] += ' "$leader"'
    quoted[3] += '"$again"'
    told = {
        "directory": str(job.directory),
        "run_dir": str(job.run_dir),
        "leader": str(job.run_dir / "leader"),
        "refused": f"saved, but not queued again; to go on: sbatch {shlex.quote(str(job.script))}",
    }
    return BODY.format(command=" \\\n    ".join(quoted), **{name: shlex.quote(text) for name, text in told.items()})


def _srun_cpus(job: Batch) -> list[str]:
    """Since Slurm 22.05 srun does not take this from sbatch. Not said, a task has all cores of its node's share."""
    return [] if job.cpus is None else [f"--cpus-per-task={job.cpus}"]


def submit(script: str, folder: Path) -> str:
    """Submits a job and returns its number.

    Args:
        script: what :func:`batch_script` returned.
        folder: where it is kept, and its output goes; made here, for Slurm ends a job whose output it cannot open
            without a word.

    Raises:
        UsageError: there is no sbatch here, or it refuses the job, and says what sbatch said; or `folder` cannot be
            written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / SCRIPT
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(file, script)
        return _submit(file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            file.unlink()
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise UsageError(f"the run directory {folder} cannot be written: {error.strerror}") from error
        raise


def _submit(file: Path) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", file], capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise UsageError(
            "there is no sbatch here: submit on a host of the cluster, or name the hosts with --hosts"
        ) from None
    if done.returncode:
        raise UsageError(f"sbatch refuses the job: {_complaint(done.stderr) or f'exit code {done.returncode}'}")
    sys.stderr.write(done.stderr)  # sites warn and greet there
    return done.stdout.strip().partition(";")[0]


def _complaint(said: str) -> str:
    """Returns what sbatch said, on one line."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in said.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try "))
