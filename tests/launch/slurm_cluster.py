"""A private Slurm on this machine: a controller and two nodes, m1 and m2, that are processes of their own.

    with slurm_cluster(folder) as cluster:        # skips the test, with the reason, where it cannot be had
        cluster.run(["srun", "-N2", "hostname"])

    keeper ──┬── slurmctld                        nobody's orphans leave the keeper, and when its input ends, by
             ├── slurmd m1 ── slurmstepd ── task  whatever death of the tests, it ends them all
             └── slurmd m2 ── slurmstepd ── task

    partition main, of high priority and default      both on both nodes; a job of `main` that finds no room takes
    partition low, with `grace` seconds               that of a job of `low`, which is warned, ended and requeued

Configuration, state and logs lie in the given folder; no munge, no system service, nothing of an installed Slurm is
touched. A requeued job may start again after 6 s: Slurm waits until the credential of its first start has expired,
which takes two minutes elsewhere and cannot be less than 5 s.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

NODES = ("m1", "m2")
CORES, GPUS = 8, 2  # that each node claims to have
FIRST, LAST = 20_000, 32_000  # ports below those that the kernel gives to clients
ATTEMPTS = 20
PATIENCE = 60  # seconds for what takes a tenth of one on a quiet machine

CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillOnBadExit={kill_on_bad_exit}
KillWait=2
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=m[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port={port1}-{port2} CPUs={cores} RealMemory=4000 {gres}
PartitionName=main Nodes=ALL Default=YES PriorityTier=10
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime={grace}
"""
# any character device passes for a GPU; no job of a test opens it
GRES = "NodeName=m[1-2] Name=gpu File=/dev/null\nNodeName=m[1-2] Name=gpu File=/dev/zero\n"

KEEPER = """\
import os, signal, subprocess, sys
from samestep.launch.process import become_subreaper, kill_orphans
become_subreaper()
controller, *nodes = [command.split("\\n") for command in sys.argv[1:]]
with subprocess.Popen(controller, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
    for line in process.stderr:
        if "Running as primary" in line:
            break
        if "fatal" in line:
            print(line.strip(), flush=True)
    else:
        kill_orphans()
        sys.exit(1)
    log = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    for node in nodes:
        subprocess.Popen(node, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # zombies of orphans go by themselves
    print("ready", flush=True)
    while os.read(0, 4096):
        pass
    kill_orphans()
"""


class Cluster:
    """A running Slurm.

    Attributes:
        folder: where its configuration, state and logs lie.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self.folder = folder
        for name in ("state", "spool/m1", "spool/m2"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "gres.conf").write_text(GRES)
        self._settings = {**settings, "folder": folder, "user": getpass.getuser(), "cores": CORES}
        self._keeper: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead Slurm's commands here, and none of another job that the tests may run in."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return {**own, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, argv: Sequence[object], **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; its output is text."""
        with self.start(argv, **env) as process:
            try:
                out, err = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, argv: Sequence[object], **env: str) -> subprocess.Popen[str]:
        """Starts a command in this cluster and returns at once."""
        return subprocess.Popen(
            [str(word) for word in argv],
            env={**self.environment, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def job(self, number: str) -> dict[str, str]:
        """Returns what Slurm says about a job: JobState, Reason, Restarts, ExitCode, …"""
        said = self.run(["scontrol", "--oneliner", "show", "job", number]).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def log(self, name: str = "slurmctld") -> str:
        """Returns what slurmctld, slurmd.m1 or slurmd.m2 has said so far."""
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def pids(self) -> list[int]:
        """Returns the processes of this cluster, those of its jobs too."""
        return [] if self._keeper is None else _descendants(self._keeper.pid)

    def bring_up(self) -> None:
        """Starts it, on ports that are free; skips the test where that cannot be."""
        said = ""
        for attempt in range(ATTEMPTS):
            self._configure(FIRST + (os.getpid() * 3 + attempt * 997) % (LAST - FIRST))
            said = self._try()
            if said == "ready":
                break
            self.stop()
            self._forget()
            assert said, "what starts slurmctld has failed itself, and says why on standard error"
            if "in use" not in said:  # a container may lack what slurmctld needs, and slurmctld says what
                pytest.skip(f"slurmctld does not start here: {said}")
        else:
            pytest.skip(f"no {ATTEMPTS} ports are free for Slurm: {said}")

    def _forget(self) -> None:
        """Clears the logs of an attempt."""
        for log in self.folder.glob("*.log"):
            log.unlink()

    def _try(self) -> str:
        """Starts the keeper and waits until both nodes work; returns "ready" or what went wrong."""
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-c", KEEPER, *("\n".join(command) for command in self._daemons())],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        said = self._keeper.stdout.readline().strip()
        if said != "ready":
            return said
        return self._first_job()

    def _first_job(self) -> str:
        """Runs a job on both nodes, which queues until they have reported; returns "ready" or what went wrong."""
        with self.start(["srun", f"-N{len(NODES)}", "true"]) as job:
            until = time.monotonic() + PATIENCE
            while job.poll() is None and not self._unbound() and time.monotonic() < until:
                time.sleep(0.02)  # the daemons say that a port is taken in their logs alone, and srun then waits long
            job.kill()
            _, said = job.communicate()
        if job.returncode == 0 and not self._unbound():  # another cluster may have answered
            return "ready"
        return self._unbound() or f"no job starts ({said.strip() or 'it waits for ever'})"

    def _unbound(self) -> str:
        """Returns what a daemon says that found its port taken, or nothing."""
        logs = "".join(self.log(name) for name in ("slurmctld", *(f"slurmd.{node}" for node in NODES)))
        return next((line for line in logs.splitlines() if "Address already in use" in line), "")

    def _daemons(self) -> Iterator[list[str]]:
        conf = str(self.folder / "slurm.conf")
        yield [_program("slurmctld"), "-D", "-i", "-f", conf]
        for node in NODES:
            yield [_program("slurmd"), "-D", "-f", conf, "-N", node]

    def _configure(self, port: int) -> None:
        text = CONF.format(**self._settings, port=port, port1=port + 1, port2=port + len(NODES))
        (self.folder / "slurm.conf").write_text(text)

    def stop(self) -> None:
        """Ends the cluster and every job; returns when no process of it is left."""
        if self._keeper is not None:
            self._keeper.communicate(timeout=PATIENCE)
            self._keeper = None


def _program(name: str) -> str:
    return shutil.which(name) or f"/usr/sbin/{name}"


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [*_descendants(child), child]
    return found


@contextlib.contextmanager
def slurm_cluster(
    folder: Path, *, gpus: bool = False, kill_on_bad_exit: bool = False, grace: int = 30
) -> Iterator[Cluster]:
    """Starts a cluster in `folder` and ends it; skips the test where that cannot be.

    Args:
        folder: an empty one, of a path without blanks.
        gpus: each node claims two.
        kill_on_bad_exit: what `srun --kill-on-bad-exit` is by default here.
        grace: seconds that a job of `low` has to leave.
    """
    for program in (_program("slurmctld"), _program("slurmd"), "srun", "sbatch", "scontrol"):
        if shutil.which(program) is None:
            pytest.skip(f"{Path(program).name} is not installed: scripts/install-test-tools installs it")
    settings = {
        "kill_on_bad_exit": int(kill_on_bad_exit),
        "grace": grace,
        "gres": f"Gres=gpu:{GPUS}" if gpus else "",
    }
    cluster = Cluster(folder, settings)
    try:
        cluster.bring_up()
        yield cluster
    finally:
        cluster.stop()
