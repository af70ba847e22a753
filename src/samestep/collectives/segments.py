"""Memory that the processes of one host share, and that is gone with the last of them, however they end.

A name in /dev/shm outlives a process that is killed before it deletes it. So there is none: the kernel gives a
descriptor (memfd_create), and the other processes open it where Linux shows it to them:

    rank 0     fd 5 = memfd_create(...)          tells the others (process 812, descriptor 5)
    rank 1     open("/proc/812/fd/5"), mmap      the memory stays as long as anybody holds or maps it

They must see each other's process numbers and belong to the same user. What has no name in /dev/shm does not count
against its size either, which containers often limit to 64 MB.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

NAME = "samestep"  # by which /proc shows it
MADE = re.compile(rf"(/memfd:{NAME}|/.*/torch_\d+_\d+_\d+) \(deleted\)")  # a tensor's is torch's


class Segment:
    """`length` bytes of memory of this process, all zero, which others can open until `close`."""

    def __init__(self, length: int) -> None:
        self.descriptor = os.memfd_create(NAME)
        try:
            os.ftruncate(self.descriptor, length)
            self.map = mmap.mmap(self.descriptor, length)
        except BaseException:
            self.close()
            raise

    @property
    def place(self) -> tuple[int, int]:
        """Where others find it: process and descriptor."""
        return os.getpid(), self.descriptor

    def close(self) -> None:
        """Lets nobody else open it; those that have mapped it keep it."""
        os.close(self.descriptor)


def open_segment(process: int, descriptor: int, length: int) -> mmap.mmap | None:
    """Returns the memory behind another process's descriptor, or None where this process may not see it.

    Where the two numbers come from a store, a stranger may have written them, and they could lead to any file that one
    of this user's processes has open. So nothing is opened but what torch or this module makes for sharing.
    """
    try:
        place = f"/proc/{int(process)}/fd/{int(descriptor)}"
        if not _is_for_sharing(place):
            return None
        own = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError, TypeError):
        return None
    try:
        right = _is_for_sharing(f"/proc/self/fd/{own}") and os.fstat(own).st_nlink == 0
        return mmap.mmap(own, length) if right else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(own)


def _is_for_sharing(place: str) -> bool:
    """Whether a descriptor is of memory without a name in any folder, this module's or a tensor's."""
    return MADE.fullmatch(str(Path(place).readlink())) is not None


Exchange = Callable[[tuple[int, int]], Sequence[Sequence[int]]]  # two numbers of every rank, on every rank


def shared_segment(length: int, *, leader: int, leads: bool, exchange: Exchange) -> mmap.mmap | None:
    """Returns memory that several processes share, all zero; None on all of them if one cannot see it.

    Collective: every rank that `exchange` reaches must call it; several may lead, each those who name it.

    `leader` is the place, in what `exchange` returns, of the rank that makes it.
    """
    own = Segment(length) if leads else None
    try:
        process, descriptor = exchange(own.place if own is not None else (0, 0))[leader]
        memory = own.map if own is not None else open_segment(process, descriptor, length)
        mapped = exchange((int(memory is not None), 0))
    finally:
        if own is not None:
            own.close()  # after all have mapped it
    return memory if all(good for good, _ in mapped) else None


def process_alive(process: int) -> bool:
    """Whether a process lives; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
