"""Where a run's files lie: the one owner of file names.

<run_dir>/run.json, events.jsonl           the command, times, exit code, failure; events of the launcher
<run_dir>/<attempt>/<host>/rankK.<kind>    out, err, error.json, events.jsonl, stacks of rank K
<run_dir>/<attempt>/<host>/rankK.spawned/  rankJ.progress, rankJ.stacks of ranks that rank K's script starts
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.errors import RankVariablesError

Stream = Literal["out", "err"]


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def logs(self, host: str, attempt: int = 0) -> Path:
        return self.path / str(attempt) / host


def spawned_folder(logs: Path, starter: int) -> Path:
    """Returns the folder of the ranks that the script of rank `starter` has started by itself."""
    return logs / f"rank{starter}.spawned"


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """Returns one rank's file of a kind: "out", "err", "error.json", "events.jsonl", "progress", "stacks"."""
    return folder / f"rank{rank}.{kind}"


def default_run_path(program: str, parent: Path | None = None) -> Path:
    """Returns `runs/<program>-<time>-<hex>` in `parent`, a name that no other run has, not yet created.

    Of a script's path or a module's name the last part is used, as far as it makes a file name.
    """
    stem = Path(program).stem if program.endswith(".py") else program
    stem = re.sub(r"[^\w.-]+", "-", Path(stem).name).strip("-.") or "run"
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return (parent or Path.cwd()) / "runs" / name


def own_folder() -> Path:
    """Returns a folder of this user alone on this host, made if need be.

    Raises:
        PermissionError: another user has made one of that name.
    """
    folder = Path(tempfile.gettempdir()) / f"samestep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    known = folder.lstat()
    if known.st_uid != os.getuid() or not stat.S_ISDIR(known.st_mode):
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def rendezvous_file(job: str | None) -> Path:
    """Returns the file through which the ranks that one mpiexec or srun started on this host find each other.

    It lies in a folder of this user alone and bears the job's name, or else that of the process that started the
    ranks: its number and the time it was started, which no other process shares.
    """
    try:
        folder = own_folder()
    except PermissionError as error:
        raise RankVariablesError(f"{error}: set MASTER_ADDR and MASTER_PORT instead") from None
    return folder / (re.sub(r"[^\w.-]+", "-", job) if job else _parent_name())


def _parent_name() -> str:
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"parent-{parent}-{started}"
