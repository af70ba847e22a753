"""What other programs say is read in whatever encoding they say it."""

from __future__ import annotations

import pytest

from samestep.errors import UsageError
from samestep.launch.hosts import slurm
from samestep.launch.hosts.join import ssh_aliases
from samestep.launch.hosts.mpiexec import command
from samestep.launch.resources import visible_gpus

ANSWERS = {
    "mpiexec": "printf 'mpiexec (OpenRTE) 4.1 de la soci\\351t\\351\\n'",
    "nvidia-smi": "printf 'GPU 0: caf\\351 (UUID: GPU-1)\\n'",
    "ssh": "printf 'user r\\351mi\\nhostname node1.lab\\n'",
    "sbatch": "printf 'sbatch: error: acc\\350s refus\\351\\n' >&2; exit 1",
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that speak Latin-1, found before the real ones."""
    for name, answer in ANSWERS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_in_latin_1_too(programs, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "--oversubscribe" in command(2, ["true"], str(programs / "mpiexec"))
    assert visible_gpus() == 1
    assert ssh_aliases("node1") == {"node1", "node1.lab"}
    with pytest.raises(UsageError, match=r"sbatch refuses the job: acc.s refus"):
        slurm.submit("#!/bin/sh\n", programs / "run")
