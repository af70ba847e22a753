"""Do a piece of work once on this machine, however many processes ask for it.

Every rank of a script runs the line that downloads the data. A barrier behind rank 0's download needs a process group,
is wrong on several machines (each has a disk of its own), and hangs the others when the download fails. Here the file
system decides, so ranks, unrelated processes and DataLoader workers are all served. The lock ends with its process:
the kernel drops an ``flock`` when the last process that holds it ends, however it ends. The holder writes its pid, host
and start beside the lock, so that errors can name it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from samestep.errors import SamestepError, UsageError
from samestep.machine import namespace

__all__ = ["once"]


@dataclass(frozen=True)
class Holder:
    """The holder of a lock: its process, in which namespace that number counts, and since when (seconds of 1970)."""

    pid: int
    host: str
    where: str
    since: float

    @classmethod
    def here(cls) -> Holder:
        return cls(os.getpid(), socket.gethostname(), _here(), time.time())

    @property
    def is_this_process(self) -> bool:
        return (self.pid, self.where) == (os.getpid(), _here())

    @property
    def may_live(self) -> bool:
        """False only if this process would see the holder, and it is gone; what others run cannot be seen."""
        return self.where != _here() or Path(f"/proc/{self.pid}").exists()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _here() -> str:
    return namespace("pid") or socket.gethostname()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file by renaming: a reader must never see half of it."""
    fresh = path.with_name(f"{path.name}-{os.getpid()}")
    fresh.write_text(json.dumps(value), encoding="utf-8")
    fresh.replace(path)


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
            _write_json(self._note, asdict(Holder.here()))
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
        if self._lock.is_locked:
            self._note.unlink(missing_ok=True)
            self._lock.release()


@contextmanager
def once(path: str | os.PathLike[str], *, timeout: float | None = None) -> Iterator[bool]:
    """Lets one process per machine do the work for ``path``; the others wait until it is done.

    The first process to enter gets True and does the work in the body of the ``with``. All others wait at the
    ``with`` and get False once the body has ended. If the body raises, or its process dies, the work counts as not
    done and the next process in line gets True. Done work stays done: the marker ``.<name>.once-done`` beside
    ``path`` says so to later runs. Delete the marker, or whatever stands at ``path``, to have the work done again.

    Not collective: it needs no world, and unrelated processes may use it. On a file system that machines share, it
    is once for all of them, if that file system keeps ``flock`` locks across machines.

    Args:
        path: what the work makes: a file or a folder. Its parent is created if need be.
        timeout: longest wait in seconds; None waits as long as some process is at work.

    Yields:
        True in the one process that has to do the work, False in all others.

    Raises:
        SamestepError: nobody finished within ``timeout`` (names the holder's pid and how long the wait was), or the
            folder beside ``path`` cannot be written.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "numbers"
        >>> for attempt in range(2):
        ...     with once(folder) as mine:
        ...         if mine:
        ...             folder.mkdir()
        ...             print("made")
        made
    """
    target = Path(path)
    if timeout is not None and not timeout >= 0:
        raise UsageError(f"once waits a number of seconds of at least 0, or for ever (None), not {timeout}")
    if target.name in {"", ".."}:
        raise UsageError(f"once needs the path of the file or folder that the work makes, not {str(target)!r}")
    if _is_done(target):
        yield False
        return
    lock = _lock(target, timeout)
    try:
        mine = not _is_done(target)
        yield mine
        if mine:
            _write_json(_beside(target, "done"), {"made": target.exists(), **asdict(Holder.here())})
    finally:
        lock.release()


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.once-{what}")


def _lock(target: Path, timeout: float | None) -> NamedLock:
    lock = NamedLock(_beside(target, "lock"))
    started = time.monotonic()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        acquired = lock.acquire(timeout)
    except OSError as error:
        raise SamestepError(f"cannot take turns at {target}: {error}") from error
    if not acquired:
        waited = time.monotonic() - started
        holder = lock.holder() or "another process"
        raise SamestepError(
            f"waited {waited:.1f} s for {holder} to finish {target}; "
            "if it works, allow a longer timeout, and if it is stuck, end it: the next process then takes over"
        )
    return lock


def _is_done(target: Path) -> bool:
    """Whether the marker says so, and what was there when it was written is there still."""
    try:
        marker = json.loads(_beside(target, "done").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ValueError, RecursionError):
        return False  # torn by a power failure: the work is done again
    return isinstance(marker, dict) and (not marker.get("made", False) or target.exists())
