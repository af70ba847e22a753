"""The doctor inside a job: srun or mpiexec has started a process for every rank, and one on each host looks around.

srun samestep doctor         mpiexec -n 4 samestep doctor
"""

from __future__ import annotations

from pathlib import Path

from samestep.doctor import between
from samestep.doctor.examine import at, run_checks
from samestep.doctor.judge import judge
from samestep.doctor.line import Finding
from samestep.doctor.variables import ENVIRONMENT
from samestep.errors import SamestepError
from samestep.rankenv import RankVariables

__all__: list[str] = []

PATIENCE = {"env": 10.0}  # seconds for all ranks to come; those variables may be left over, and nobody come
USUAL = 30.0
LOOKING = 150.0  # seconds for all of them to look around


def check_job(told: RankVariables, folder: Path) -> tuple[list[Finding], bool]:
    """Returns the lines of all hosts, and whether this process is the one to show them.

    Collective: every process of the job must call it.
    """
    import samestep
    from samestep.runtime.exchange import all_gather_json

    try:
        patience = PATIENCE.get(told.source, USUAL)
        with samestep.world(backend="gloo", device="cpu", timeout=LOOKING, join_timeout=patience) as world:
            leads = world.local_rank == 0
            lines = run_checks(folder, steps=world.is_first) if leads else []
            host = between.own_name()
            gathered = all_gather_json(world.everyone, [line.as_json() for line in at(host, lines)])
            found = [Finding(**line) for lines in gathered for line in lines]
            return [*found, *judge(between.measure(world, folder))], world.is_first
    except (SamestepError, RuntimeError) as error:
        return [_alone(told, error), *run_checks(folder)], told.rank == 0


def _alone(told: RankVariables, error: Exception) -> Finding:
    said = str(error).splitlines()[0]
    text = f"{told.source} says that this is rank {told.rank} of {told.size}, and they do not meet: {said}"
    fix = f"unset {' '.join(ENVIRONMENT)}  # or start the doctor as the ranks are started: srun samestep doctor"
    return Finding("ranks of this job", "error", text, "a training started like this waits, and fails", fix)
