"""The job that `samestep run --slurm` submits: a batch script whose srun starts `samestep run` once on each node.

Task 0 leads. Every task exits with the code of the run; with 75, when every rank has saved, the job is queued again.
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

WARNING_S = 60  # seconds before the time limit at which the ranks are asked to save; Slurm may be a minute early
AFTERWARDS = 30.0  # seconds that are left when a save has taken all of its grace
LONGEST = 65_535  # seconds that sbatch takes
SCRIPT = "samestep.sbatch"  # what is submitted, in the run directory
LEAVE_TIME_S = 60  # seconds for the other tasks to end when one has


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What a job is to be; all nodes must see both folders."""

    program: tuple[str, ...]  # the script, or `-m` and the module, and its arguments
    directory: Path  # where it runs
    run_dir: Path  # where the run's files and the job's output go
    options: tuple[str, ...] = ()  # of `samestep run`, beside `-n` and `--run-dir`
    nodes: int = 1
    ranks: int | None = None  # on each node; one per GPU by default, else one
    sbatch_args: str = ""  # further options of sbatch, such as "--account=physics"; they win over the others
    wait: int = LEAVE_TIME_S  # seconds that other tasks may stay when one has left; 0, for `--lost-host`, is for ever
    variables: tuple[str, ...] = ()  # names of those that go along
    warning: int = WARNING_S  # seconds before the time limit at which the ranks are asked to save


def warning_for(grace: float) -> int:
    """Returns how many seconds before its limit a job must be warned whose ranks may take `grace` seconds to save."""
    return min(LONGEST, max(WARNING_S, math.ceil(grace + AFTERWARDS)))


def batch_script(job: BatchJob) -> str:
    header = "\n".join(f"#SBATCH {line}" for line in _header(job))
    return f"#!/bin/bash\n{header}\n\n{_body(job)}"


def _header(job: BatchJob) -> Iterator[str]:
    yield _option("job-name", Path(job.program[1] if job.program[0] == "-m" else job.program[0]).stem)
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={job.ranks or 1}"
    # to the batch script alone: in the tasks it would end the workers of a DataLoader, and ranks that cannot save
    yield f"--signal=B:USR1@{job.warning}"
    yield "--requeue"
    yield "--open-mode=append"
    yield _option("output", f"{job.run_dir}/".replace("%", "%%") + "slurm-%j.out")
    if job.variables:  # names alone: every user can read the script
        yield f"--export=ALL,{','.join(job.variables)}"
    if job.sbatch_args:
        yield _line(job.sbatch_args.removeprefix("#SBATCH").strip())


def _option(name: str, value: str) -> str:
    return f"--{name}={shlex.quote(_line(value))}"


def _line(text: str) -> str:
    """Returns `text`, which must not begin another line: sbatch or the shell would run that."""
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


def _body(job: BatchJob) -> str:
    # --kill-on-bad-exit=1 would end the other tasks by SIGTERM when the first leaves with 75, and 143 is higher
    # since Slurm 22.05 srun does not take --cpus-per-task from sbatch; not said, a task has all of its node's share
    lines = [
        ["srun", "--kill-on-bad-exit=0", f"--wait={job.wait}", "--cpu-bind=none"],
        ["bash", "-c", LEAD],
        [sys.executable, "-P", "-m", "samestep", "run", "-n", str(job.ranks or "auto"), *job.options],
        ["--run-dir", str(job.run_dir)],
        list(job.program),
    ]
    quoted = [shlex.join(line) for line in lines]
    quoted[1] += ' "$leader"'
    quoted[3] += '"$again"'
    words = {
        "directory": str(job.directory),
        "run_dir": str(job.run_dir),
        "leader": str(job.run_dir / "leader"),
        "refused": f"saved, but not queued again; to go on: sbatch {shlex.quote(str(job.run_dir / SCRIPT))}",
    }
    return BODY.format(command=" \\\n    ".join(quoted), **{name: shlex.quote(text) for name, text in words.items()})


def submit(script: str, folder: Path) -> str:
    """Submits a job and returns its number.

    `folder`, which keeps the script and the output, is made here: Slurm ends a job whose output it cannot open.

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
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in said.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try "))
