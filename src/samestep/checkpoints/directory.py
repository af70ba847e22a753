"""The names in a checkpoint directory, which run it belongs to, and what may be deleted from it. No torch here.

    PATH/
      step-00000120/            a complete checkpoint: folders get this name by one rename, never by writing into it
      step-00000120.1/          a later one of the same step (the end of the epoch, after the step was saved)
      step-00000100.bad/        quarantined: what it holds is not what was saved, or is of another run
      .step-00000140.tmp-3f9a/  being written, or left by a run that died; the next start removes it
      replaced-1/               the checkpoints of an earlier run, moved away by one that started anew
      .run                      the id of the run that all of this belongs to, and the beginning of its SHA-256
      .lock  .lock.holder       one live run per directory

Digests show that a folder is what was saved; so is a folder that was exchanged with that of another run. Therefore a
run draws an id when it begins, keeps it through all resumptions, and writes it into every manifest. A directory
without a readable `.run` takes on the id of the checkpoint that is resumed, so one folder copied into a new directory
continues there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoints.manifest import RUN_ID
from samestep.data.once import NamedLock
from samestep.errors import CheckpointError
from samestep.files import make_private, open_private

RUN_FILE = ".run"
_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}(?:\.\d+)?\.tmp-[0-9a-f]+")

# A run that is being restarted may overlap its dying predecessor for a moment, and forked DataLoader workers
# notice the death of their parent within 5 s. A predecessor that lives is refused at once after the first.
_GRACE_S = 3.0
_GRACE_FOR_THE_DEAD_S = 20.0

_REASONS = {
    errno.ENOENT: "it is no longer there",
    errno.ENOTDIR: "a part of it is a file",
    errno.EEXIST: "it is a file",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "the disk quota is used up",
}


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the `last` so many, and for ever those of every `every`-th step."""

    last: int
    every: int | None = None

    def expired(self, names: Sequence[str]) -> list[str]:
        """Returns the names that may go, of those given from the oldest to the newest.

        >>> RetentionPolicy(1, every=20).expired(["step-00000010", "step-00000020", "step-00000030", "step-00000040"])
        ['step-00000010', 'step-00000030']
        """
        old = names[: -self.last]
        return [name for name in old if self.every is None or _order(name)[0] % self.every]


class CheckpointDirectory:
    """A directory of checkpoints, owned by this process until :meth:`close`; refused where another live run owns it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            make_private(path)
            self._lock = NamedLock(path / ".lock")
            self._acquire()
            for entry in path.iterdir():  # safe: the lock says that nobody else is writing here
                if _UNFINISHED.fullmatch(entry.name):
                    _delete(entry)
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {path}: {os_error_text(error)}") from error

    def close(self) -> None:
        """Lets another run use the directory."""
        self._lock.release()

    def names(self) -> list[str]:
        """Complete checkpoints, oldest first."""
        try:
            return complete(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot look into {self.path}: {os_error_text(error)}") from error

    def fresh_name(self, step: int) -> str:
        """A name for a checkpoint of ``step`` that sorts behind all that exist of this step."""
        name = f"step-{step:08d}"
        taken = [number for other, number in map(_order, self.names()) if other == step]
        return f"{name}.{max(taken) + 1}" if taken else name

    def temporary(self, name: str) -> Path:
        folder = self._unfinished(name)
        folder.mkdir(mode=0o700)
        return folder

    def final_name(self, folder: Path) -> str:
        """The name that a folder of :meth:`temporary` is to get."""
        return folder.name.removeprefix(".").rpartition(".tmp-")[0]

    def set_run_id(self, run: str) -> None:
        """Makes this the directory of that run; to be called before anything of it is saved here."""
        if run and read_run_id(self.path) != run:
            write_run_id(self.path, run)
            sync_folder(self.path)

    def quarantine(self, name: str) -> str:
        """Renames a checkpoint that cannot be trusted; returns its new name."""
        aside, count = f"{name}.bad", 1
        while (self.path / aside).exists():
            count += 1
            aside = f"{name}.bad-{count}"
        (self.path / name).rename(self.path / aside)
        sync_folder(self.path)
        return aside

    def replace_all(self) -> Path | None:
        """Moves all checkpoints into a folder ``replaced-N``, and returns it; None where there are none."""
        names = self.names()
        if not names:
            return None
        count = 1
        while (folder := self.path / f"replaced-{count}").exists():
            count += 1
        folder.mkdir(mode=0o700)
        rest = sorted(entry.name for entry in self.path.glob("step-*") if entry.name not in names)
        for name in (*rest, *names, RUN_FILE):  # the newest last: killed meanwhile, a run resumes from that one
            with suppress(FileNotFoundError):
                (self.path / name).rename(folder / name)
        sync_folder(folder)
        sync_folder(self.path)
        return folder

    def prune(self, retention: RetentionPolicy) -> None:
        for name in retention.expired(self.names()):
            # Renamed first: killed while deleting, half a checkpoint must not bear a complete one's name.
            expired = self._unfinished(name)
            (self.path / name).rename(expired)
            _delete(expired)

    def _unfinished(self, name: str) -> Path:
        return self.path / f".{name}.tmp-{secrets.token_hex(4)}"

    def _acquire(self) -> None:
        if self._lock.acquire(0):
            return
        holder = self._lock.holder()
        if holder is not None and holder.is_this_process:
            raise CheckpointError(
                f"{self.path} is in use by an earlier checkpoint of this very process; close() that one first"
            )
        if self._lock.acquire(_GRACE_S if holder is None or holder.may_live else _GRACE_FOR_THE_DEAD_S):
            return
        raise CheckpointError(
            f"{self.path} is in use by another run ({self._lock.holder() or 'process unknown'}); "
            "wait until it ends, end it, or give this run a directory of its own"
        )


def _delete(entry: Path) -> None:
    """Deletes a folder of ours, or what somebody has put in its place; never what a link leads to."""
    if entry.is_symlink() or not entry.is_dir():
        entry.unlink()
    else:
        shutil.rmtree(entry)


def _order(name: str) -> tuple[int, int]:
    """The step of a complete checkpoint, and the number of the save of this step."""
    match = _COMPLETE.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def complete(path: Path) -> list[str]:
    """Returns the names of the complete checkpoints in ``path``, oldest first. Whoever only looks needs no lock."""
    return sorted((entry.name for entry in path.iterdir() if is_complete(entry.name)), key=_order)


def is_complete(name: str) -> bool:
    return _COMPLETE.fullmatch(name) is not None


def latest_message(path: Path) -> str:
    """Says where a run that was interrupted resumes; nothing is saved at Ctrl-C, since somebody waits."""
    with suppress(OSError):
        if names := complete(path):
            return f"{path}/{names[-1]} is the newest checkpoint, from which the same command resumes"
    return f"nothing was saved in {path} yet, the same command begins anew"


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` survive a power failure; syncing a file does not sync its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Writes a new file that only this user may read, and that survives a power failure if its name does."""
    with open_private(path, "x", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def os_error_text(error: OSError) -> str:
    return _REASONS.get(error.errno or 0, f"{error.strerror or error}")


# --- the run that a directory belongs to --------------------------------------------------------------------


def new_run_id() -> str:
    return secrets.token_hex(8)


def read_run_id(directory: Path) -> str | None:
    """Returns the id of the run that `directory` belongs to; None where nothing readable says so."""
    try:
        descriptor = os.open(directory / RUN_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
            run, _, digest = file.read(1000).strip().partition(" ")  # it may be any file, of any size
    except OSError:
        return None
    return run if RUN_ID.fullmatch(run) and digest == _run_digest(run) else None


def write_run_id(directory: Path, run: str) -> None:
    """Makes `directory` belong to a run; whoever reads meanwhile finds the old id or the new one."""
    fresh = directory / f"{RUN_FILE}.tmp"
    fresh.unlink(missing_ok=True)  # of a run that was killed here
    write_synced(fresh, f"{run} {_run_digest(run)}\n")
    fresh.rename(directory / RUN_FILE)


def foreign_run(run: str, directory: Path) -> str | None:
    """Returns a line that says so where a checkpoint of this run does not belong into `directory`."""
    owner = read_run_id(directory)
    if owner is None or run in {"", owner}:
        return None
    return f"foreign run in the directory: it is of run {run}, and the directory belongs to run {owner} ({RUN_FILE})"


def _run_digest(run: str) -> str:
    return hashlib.sha256(f"samestep run {run}".encode()).hexdigest()[:32]
