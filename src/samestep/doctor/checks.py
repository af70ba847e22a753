"""All checks of one machine at once, so that what waits for a disk or for torch does not hold up the rest.

Inside a job, whose ranks srun or mpiexec has started, one process on each host runs them:

    srun samestep doctor         mpiexec -n 4 samestep doctor
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from samestep.doctor import environment, gpus, machine, network, software, trial
from samestep.doctor.environment import ENVIRONMENT
from samestep.doctor.finding import Finding, guarded
from samestep.errors import SamestepError
from samestep.rankenv import RankVariables

TIMEOUTS = {"env": 10.0}  # seconds for all ranks to come; those variables may be left over, and nobody come
TIMEOUT = 30.0
LOOKING = 150.0  # seconds for all of them to look around


def all_checks(folder: Path, busy: float = 0.0) -> dict[str, Callable[[], Iterable[Finding]]]:
    """Returns all checks in the order in which they are shown; `busy` is how many cores others kept busy before."""
    return {
        "software": software.check,
        "versions": software.check_versions,
        "GPUs": gpus.check,
        "cores and memory": lambda: machine.check(busy=busy),
        "disk": lambda: machine.check_disk(folder),
        "network": network.check,
        "variables": environment.check,
        "a step of two ranks": trial.check,
    }


def run_checks(folder: Path, tell: Callable[[str], None] = lambda _: None, *, steps: bool = True) -> list[Finding]:
    """Runs all checks, those whose ranks take steps only with `steps`; `tell` is told which are still running."""
    all_of_them = all_checks(folder, machine.busy_before())
    chosen = {check: look for check, look in all_of_them.items() if steps or look is not trial.check}
    running = list(chosen)
    tell(", ".join(running))
    with ThreadPoolExecutor(len(chosen)) as pool:
        futures = {pool.submit(guarded, check, look): check for check, look in chosen.items()}
        for future in as_completed(futures):
            running.remove(futures[future])
            tell(", ".join(running))
    return [line for future in futures for line in future.result()]


def check_job(variables: RankVariables, folder: Path) -> tuple[list[Finding], bool]:
    """Returns the lines of all hosts, and whether this process is the one to show them.

    Collective: every process of the job must call it.
    """
    import samestep
    from samestep.doctor import pairwise
    from samestep.doctor.hosts import judge
    from samestep.runtime.exchange import all_gather_json

    try:
        timeout = TIMEOUTS.get(variables.source, TIMEOUT)
        with samestep.world(backend="gloo", device="cpu", timeout=LOOKING, join_timeout=timeout) as world:
            leads = world.local_rank == 0
            lines = run_checks(folder, steps=world.is_first) if leads else []
            own = [replace(line, host=socket.gethostname()).as_json() for line in lines]
            gathered = all_gather_json(world.everyone, own)
            found = [Finding(**line) for lines in gathered for line in lines]
            return [*found, *judge(pairwise.measure(world, folder))], world.is_first
    except (SamestepError, RuntimeError) as error:
        said, which = str(error).splitlines()[0], f"rank {variables.rank} of {variables.size}"
        text = f"{variables.source} says that this is {which}, and they do not meet: {said}"
        fix = f"unset {' '.join(ENVIRONMENT)}  # or start the doctor as the ranks are started: srun samestep doctor"
        effect = "a training started like this waits, and fails"
        alone = Finding("ranks of this job", "error", text, effect, fix)
        return [alone, *run_checks(folder)], variables.rank == 0
