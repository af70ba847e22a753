"""Do a piece of work once on this machine, however many processes ask for it.

Every rank of a script runs the line that downloads the data. PyTorch's tutorials let rank 0 do it and put a
barrier behind it, which needs a process group, is wrong on several machines (each has a disk of its own), and
hangs the others for half an hour when the download fails. Here the file system decides, so ranks, unrelated
processes and DataLoader workers are all served:

    process A   lock ── work ── marker ── unlock
    process B   lock ........ waits ............ marker is there: go on
    process C   (dies while it works: the kernel unlocks, there is no marker, the next in line takes over)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from samestep.data.lock import Holder, NamedLock
from samestep.errors import SamestepError, UsageError

__all__ = ["once"]


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
            _mark_done(target)
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


def _mark_done(target: Path) -> None:
    marker = _beside(target, "done")
    fresh = marker.with_name(f"{marker.name}-{os.getpid()}")
    fresh.write_text(json.dumps({"made": target.exists(), **asdict(Holder.here())}), encoding="utf-8")
    fresh.replace(marker)
