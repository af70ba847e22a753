"""Failures of the machine and not of the script: a taken port, no memory, a full disk, a lost agent, the recorder.

One process alone opens no port that others need, and takes less memory: that it ends well accuses no script here. A
port that the ranks themselves take twice is the script's own mistake: once they are gone, it is free again.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from pathlib import Path

from samestep.launch.rank.user_code import is_user_file
from samestep.verification import runs
from samestep.verification.runs import Ended

_TAKEN = re.compile(r"address already in use", re.IGNORECASE)
_PORT = re.compile(r"\bport: (\d+)|', (\d+)\)")  # as torch's store says it; as asyncio does
_FULL = re.compile("No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing")
_LOOK_S = 0.1
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .+(?:\n {4,}(.*))?', re.MULTILINE)
_RECORDER = f"{Path(__file__).parent}{os.sep}"
_CALLS_ON = re.compile(r"original|next\(|super\(\)|yield from|^for ")  # what the script has called, or loads


def taken_port(ended: Ended) -> int | None:
    """Returns the port whose use made a run fail; None where there is none or it is not known."""
    message = str((ended.failure or {}).get("message") or "")
    found = _PORT.search(message) if _TAKEN.search(message) else None
    return None if found is None else int(found[1] or found[2])


def is_taken(port: int) -> bool:
    """Tells whether anybody listens on a port of this machine, at whatever address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store: connections that end are no bar
        try:
            trial.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def comes_free(port: int, seconds: float) -> bool:
    """Waits until nobody listens on a port any more, or the time is over; returns whether nobody does."""
    until = time.monotonic() + seconds
    while is_taken(port):
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_S)
    return True


def recorder_fault(ended: Ended) -> str | None:
    """Returns what to say where samestep's own recorder has raised what ended a run; None where the script did.

    A call of the script that fails has a frame of the recorder, too, which has called the original on.
    """
    for failure in runs.failures(ended.folder):
        frames = _FRAME.findall(str(failure.get("traceback", "")))
        last = max((number for number, frame in enumerate(frames) if is_user_file(frame[0])), default=-1)
        ours = [frame for frame in frames[last + 1 :] if _RECORDER in frame[0]]
        if ours and not _CALLS_ON.search(ours[-1][2]):
            sys.stderr.write(failure["traceback"])
            where, said = f"{Path(ours[-1][0]).name}:{ours[-1][1]}", str(failure["message"])[:200]
            return (
                f"samestep itself failed at {where} while it recorded ({failure['exception']}: {said}): please report "
                "this with the traceback above"
            )
    return None


def to_blame(ended: Ended) -> str | None:
    """Returns which failure of the machine has ended a run, and its fix; None where there is no sign of one."""
    port, failure = taken_port(ended), ended.failure
    if port is not None and is_taken(port):
        return (
            f"another program listens on port {port} of this machine, so the ranks cannot meet there: `ss -ltnp` names "
            "it; end it, or give the script another port"
        )
    if failure is not None and failure.get("kind") == "oom":
        return f"this machine has not enough memory for so many ranks: rank {failure['rank']}: {failure['message']}"
    if failure is not None and _FULL.search(str(failure["message"])):
        return f"a disk is full, perhaps with what is recorded (TMPDIR names another): {failure['message'][:300]}"
    if failure is not None and failure["exception"] == "HostLost":
        return f"what held the ranks has gone: {failure['message']}"
    if failure is None and ended.code < 0:
        return f"signal {-ended.code} has ended the launcher of the ranks, from outside"
    return None
