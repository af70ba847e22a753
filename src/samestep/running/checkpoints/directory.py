"""The names in a checkpoint directory, who owns it, and what may be deleted from it.

    PATH/
      step-00000120/            a complete checkpoint: folders get this name by one rename, never by writing into it
      step-00000120.1/          a later one of the same step (the end of the epoch, after the step was saved)
      step-00000100.bad/        quarantined: what it holds is not what was saved, or is of another run
      .step-00000140.tmp-3f9a/  being written, or left by a run that died; the next start sweeps it
      .run                      the name of the run that all of this belongs to
      .lock  .lock.holder       one live run per directory

PyTorch's distributed checkpoint writes into a directory that may hold the previous one, and removes its metadata
before it renames the new: killed there, old and new are both lost (measured on torch 2.13).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.data.once import NamedLock
from samestep.errors import CheckpointError
from samestep.files import make_private
from samestep.running.checkpoints import identity

__all__ = ["Directory", "Keep", "reason", "sync_folder"]

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
class Keep:
    """Which checkpoints stay: the `newest` so many, and for ever those of every `each`-th step."""

    newest: int
    each: int | None = None

    def doomed(self, names: Sequence[str]) -> list[str]:
        """Returns the names that may go, of those given from the oldest to the newest.

        >>> Keep(1, each=20).doomed(["step-00000010", "step-00000020", "step-00000030", "step-00000040"])
        ['step-00000010', 'step-00000030']
        """
        old = names[: -self.newest]
        return [name for name in old if self.each is None or _step_of(name) % self.each]


def _step_of(name: str) -> int:
    match = _COMPLETE.fullmatch(name)
    assert match is not None
    return int(match[1])


def what_is_left(path: Path) -> str:
    """Says where a run that was interrupted goes on; nothing is saved for a Ctrl-C, since somebody waits."""
    with suppress(OSError):
        if names := complete(path):
            return f"{path}/{names[-1]} is the newest checkpoint, from which the same command resumes"
    return f"nothing was saved in {path} yet, the same command begins anew"


class Directory:
    """A directory of checkpoints, owned by this process until :meth:`close`.

    Raises:
        CheckpointError: the directory cannot be used, or another live run owns it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            make_private(path)
            self._lock = NamedLock(path / ".lock")
            self._own()
            self._sweep()
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {path}: {reason(error)}") from error

    def close(self) -> None:
        """Lets another run use the directory."""
        self._lock.release()

    def names(self) -> list[str]:
        """Complete checkpoints, oldest first."""
        try:
            return complete(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot look into {self.path}: {reason(error)}") from error

    def fresh_name(self, step: int) -> str:
        """A name for a checkpoint of ``step`` that sorts behind all that exist of this step."""
        name = f"step-{step:08d}"
        found = [match for other in self.names() if (match := _COMPLETE.fullmatch(other))]
        taken = [int(match[2] or 0) for match in found if int(match[1]) == step]
        return f"{name}.{max(taken) + 1}" if taken else name

    def temporary(self, name: str) -> Path:
        """Makes and returns a fresh folder in which ``name`` can be put together."""
        folder = self._unfinished(name)
        folder.mkdir(mode=0o700)
        return folder

    def final_name(self, folder: Path) -> str:
        """The name that a folder of :meth:`temporary` is to get."""
        return folder.name.removeprefix(".").rpartition(".tmp-")[0]

    def belong_to(self, run: str) -> None:
        """Makes this the directory of the run of that name; to be called before anything of it is saved here."""
        if run and identity.read(self.path) != run:
            identity.write(self.path, run)
            sync_folder(self.path)

    def set_aside(self, name: str) -> str:
        """Renames a checkpoint that cannot be trusted; returns its new name."""
        aside, count = f"{name}.bad", 1
        while (self.path / aside).exists():
            count += 1
            aside = f"{name}.bad-{count}"
        (self.path / name).rename(self.path / aside)
        sync_folder(self.path)
        return aside

    def prune(self, keep: Keep) -> None:
        """Deletes the complete checkpoints that ``keep`` lets go."""
        for name in keep.doomed(self.names()):
            # Renamed first: killed while deleting, half a checkpoint must not bear a complete one's name.
            doomed = self._unfinished(name)
            (self.path / name).rename(doomed)
            _delete(doomed)

    def _unfinished(self, name: str) -> Path:
        return self.path / f".{name}.tmp-{secrets.token_hex(4)}"

    def _own(self) -> None:
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

    def _sweep(self) -> None:
        # Safe, because the lock says that nobody else is writing here.
        for entry in self.path.iterdir():
            if _UNFINISHED.fullmatch(entry.name):
                _delete(entry)


def _delete(entry: Path) -> None:
    """Deletes a folder of ours, or what somebody has put in its place; never what a link leads to."""
    if entry.is_symlink() or not entry.is_dir():
        entry.unlink()
    else:
        shutil.rmtree(entry)


def complete(path: Path) -> list[str]:
    """Returns the names of the complete checkpoints in ``path``, oldest first. Whoever only looks needs no lock."""
    found = [match for entry in path.iterdir() if (match := _COMPLETE.fullmatch(entry.name))]
    return [match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2] or 0)))]


def is_complete(name: str) -> bool:
    """Returns whether a folder of this name is a complete checkpoint."""
    return _COMPLETE.fullmatch(name) is not None


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` survive a power failure; syncing a file does not sync its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """Returns in words why the operating system refused."""
    return _REASONS.get(error.errno or 0, f"{error.strerror or error}")
