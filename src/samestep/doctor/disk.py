"""The disk that runs are written to: room, speed, how long a write takes to be safe, and whether locks hold."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from filelock import FileLock, Timeout

from samestep.doctor.finding import Finding, ok
from samestep.text import format_bytes, format_duration

__all__: list[str] = []

WRITTEN = 32 << 20  # bytes
SYNCS = 5
SLOW = 50e6  # bytes a second
LONG = 0.2  # seconds for a small write to be safe
LEAST = 1 << 30  # bytes


def check(folder: Path) -> Iterator[Finding]:
    check = "disk"
    try:
        with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=folder) as name:
            yield _room(folder)
            yield _speed(Path(name))
            yield locks(Path(name))
    except OSError as error:
        fix = "mkdir -p ~/runs && cd ~/runs  # or name a folder by --run-dir"
        text = f"{folder} cannot be written: {error.strerror}"
        yield Finding(check, "error", text, "a run cannot keep its logs and checkpoints", fix)


def _room(folder: Path) -> Finding:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    text = f"{format_bytes(free)} free in {folder} ({kind_of(folder)})"
    if free < LEAST:
        effect = "checkpoints are refused for want of room"
        return Finding(
            "disk", "warning", text, effect, f"du -xh --max-depth=2 {shlex.quote(str(folder))} | sort -h | tail"
        )
    return ok("disk", text)


def kind_of(folder: Path) -> str:
    """Returns the file system's kind: "ext4", "nfs4"; "?" where the kernel does not tell."""
    device = folder.stat().st_dev
    named = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        found = re.fullmatch(r"\d+ \d+ (\S+) .* - (\S+) .*", line)
        if found and found[1] == named:
            return found[2]
    return "?"


def _speed(folder: Path) -> Finding:
    block = os.urandom(1 << 20)
    begun = time.perf_counter()
    with (folder / "large").open("wb", buffering=0) as file:
        for _ in range(WRITTEN >> 20):
            file.write(block)
        os.fsync(file.fileno())
    rate = WRITTEN / (time.perf_counter() - begun)
    safe = median(_sync(folder / str(number)) for number in range(SYNCS))
    text = f"{format_bytes(rate)}/s written and safe; a small write safe after {format_duration(safe)}"
    if rate < SLOW or safe > LONG:
        effect = "checkpoints take long; they are written beside the training, but a preempted run must wait"
        return Finding("disk speed", "warning", text, effect, "df -hT  # give checkpoints a folder on a local disk")
    return ok("disk speed", text)


def _sync(path: Path) -> float:
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        file.write(b"samestep")
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def locks(folder: Path) -> Finding:
    """Judges whether a lock in a folder keeps out a second one."""
    name = str(folder / "lock")
    try:
        with FileLock(name, timeout=5):
            try:
                with FileLock(name, timeout=0):
                    pass
            except Timeout:
                return ok("file locks", "hold")
    except (OSError, NotImplementedError, Timeout) as error:
        text = f"do not work here: {error}"
    else:
        text = "are not exclusive"
    effect = "samestep.once may download twice, and two runs may write one checkpoint"
    fix = "findmnt -T . -o TARGET,FSTYPE,OPTIONS  # NFS: mount it without nolock; or use a local folder"
    return Finding("file locks", "warning", text, effect, fix)
