"""The file through which tasks that srun or mpiexec has started find task 0, which leads.

A file system is all that these tasks share for certain. A network file system does not report what other hosts write,
so they look again and again. The file must belong to their user: they run what its writer says.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from samestep.errors import RendezvousError, UsageError
from samestep.files import write_private
from samestep.launch.hosts.secure_link import new_token
from samestep.paths import own_folder, rendezvous_file
from samestep.rankenv import RankVariables, variable

KEPT_IN = "secret"
SHORTEST_S, LONGEST_S = 0.01, 0.5  # seconds between two looks
STALE_S = 600.0  # seconds; tasks of one step start within this
START_MARKERS = (  # all tasks of a step have them alike; the port is that of the srun that has started them
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_START_TIME",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_LAUNCHER_PORT",
)
GONE = (errno.ENOENT, errno.ESTALE)  # ESTALE: replaced on the server after it was found here


def rendezvous_path(task: RankVariables, who: str = "head") -> Path:
    """Returns the file of this step: private to this host where the step is, else in the working directory.

    `who` tells apart on one host what the tasks meet for: to be agents of a run ("head"), or its ranks.
    """
    if task.one_host:
        return rendezvous_file(f"{task.job}-{_start_digest()}-{who}" if task.job else None)
    job = re.sub(r"[^\w.-]+", "-", task.job or "job")
    return Path.cwd() / f".samestep-{job}-{_start_digest()}.json"


def _start_digest() -> str:
    """Returns a short word that another start of the same step does not have."""
    started = "\n".join(variable(name) or "" for name in START_MARKERS)
    return hashlib.sha256(started.encode()).hexdigest()[:8]


def write(path: Path, content: dict[str, Any]) -> None:
    """Puts what the others need to know where they look for it; readable by this user alone."""
    try:
        write_private(path, json.dumps(content))
    except OSError as error:
        raise RendezvousError(
            f"task 0 cannot say where it is, in {path}: {error.strerror}; start in a directory that you may write and "
            "all hosts share"
        ) from error


def user_secret() -> str:
    """Returns a secret that this user's processes on this host share, made by the first that asks for it.

    For what listens on the loopback address, where the other users of the host can connect too. It lies in a file that
    they cannot read.
    """
    try:
        file = own_folder() / KEPT_IN
        if not file.exists():
            descriptor, draft = tempfile.mkstemp(dir=file.parent)  # mode 0600
            with os.fdopen(descriptor, "w", encoding="ascii") as fresh:
                fresh.write(new_token())
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)  # whole or not at all, and never over another's
            Path(draft).unlink()
        return file.read_text(encoding="ascii")
    except OSError as error:
        raise UsageError(f"no secret can be kept on this host ({error}): set SAMESTEP_TOKEN") from error


def wait_for(path: Path, seconds: float) -> dict[str, Any]:
    """Returns what task 0 has written; raises RendezvousError where nothing was, in time, or it is another user's."""
    until = time.monotonic() + seconds
    pause = SHORTEST_S
    while (found := _read(path)) is None:
        if time.monotonic() >= until:
            raise RendezvousError(
                f"task 0 has not said where it is, in {path} within {seconds:.0f} s: did it start, and do all hosts "
                "share this directory?"
            )
        time.sleep(pause)
        pause = min(LONGEST_S, pause * 1.5)
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """Returns what stands there, or None where nothing does, or a leftover."""
    with contextlib.suppress(OSError):  # else a network file system does not ask its server again for half a minute
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    try:
        with path.open(encoding="utf-8") as file:
            known = os.fstat(file.fileno())
            if time.time() - known.st_mtime >= STALE_S:
                return None
            if known.st_uid != os.geteuid():
                raise RendezvousError(f"{path} belongs to somebody else: start in a directory that is your own")
            found: dict[str, Any] = json.load(file)
            return found
    except OSError as error:
        if error.errno not in GONE:
            raise RendezvousError(f"{path}, where task 0 says where it is, cannot be read: {error.strerror}") from error
        return None
