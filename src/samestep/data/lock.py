"""A lock that dies with its process, and beside it a note of who holds it.

The kernel drops an ``flock`` when the last process that holds it ends, however it ends, so a crash cannot leave
it locked. What the kernel does not tell a waiter is whom it waits for: the holder writes its pid, host and start
beside the lock, and an error can then name them. PyTorch has no counterpart; its tutorials bring their own.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from samestep.machine import namespace

__all__ = ["Holder", "NamedLock"]


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        pid: its process.
        host: that it runs on, by name.
        where: the namespace that its number counts in; hosts of one name have several.
        since: when it was locked, in seconds since 1970.
    """

    pid: int
    host: str
    where: str
    since: float

    @classmethod
    def here(cls) -> Holder:
        """This process, from now on."""
        return cls(os.getpid(), socket.gethostname(), _here(), time.time())

    @property
    def is_this_process(self) -> bool:
        """Whether the holder is the very process that asks."""
        return (self.pid, self.where) == (os.getpid(), _here())

    @property
    def may_live(self) -> bool:
        """False only if this process would see the holder, and it is gone; what others run cannot be seen."""
        return self.where != _here() or Path(f"/proc/{self.pid}").exists()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _here() -> str:
    return namespace("pid") or socket.gethostname()


class NamedLock:
    """An exclusive lock on the file ``path``, with a note of its holder in ``path.holder``.

    Forked children inherit the lock on old versions of filelock; there it is free only when they have ended too.
    """

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path, thread_local=False)
        self._note = path.with_name(path.name + ".holder")

    def acquire(self, timeout: float | None) -> bool:
        """Waits up to ``timeout`` seconds (None: for ever) for the lock; returns whether it is held now."""
        try:
            self._lock.acquire(timeout=-1 if timeout is None else timeout, poll_interval=0.05)
        except Timeout:
            return False
        try:
            self._write_note()
        except BaseException:
            self._lock.release()
            raise
        return True

    def holder(self) -> Holder | None:
        """Who wrote the note last, or None if nobody did or the note is unreadable."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return Holder(int(note["pid"]), str(note["host"]), str(note["where"]), float(note["since"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def release(self) -> None:
        """Gives the lock back; does nothing if it is not held."""
        if self._lock.is_locked:
            self._note.unlink(missing_ok=True)
            self._lock.release()

    def _write_note(self) -> None:
        # Renamed into place: a waiter must never read half a note.
        fresh = self._note.with_name(f"{self._note.name}-{os.getpid()}")
        fresh.write_text(json.dumps(asdict(Holder.here())), encoding="utf-8")
        fresh.replace(self._note)
