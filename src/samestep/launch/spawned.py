"""Ranks that the script starts by itself, with torch.multiprocessing or multiprocessing.

Each keeps its record and its stacks in the run directory from the moment it has initialised its process group, so
that a failure has a rank's number: torch.multiprocessing knows only which of its processes raised, and the number of
the signal that ended one.

    the rank that spawned      <logs>/rank0.spawned/rank1.progress     <- process 4711 is rank 1
    ProcessExitedException           │
      error_pid 4711 ────────────────┘
"""

from __future__ import annotations

import faulthandler
import re
import traceback
from dataclasses import replace
from pathlib import Path

from samestep import progress
from samestep.files import open_private
from samestep.launch.failure import FailureRecord, cut, describe, own_line, signal_name, text_in, tried
from samestep.launch.stacks import STACKS_SIGNAL, place_in
from samestep.paths import rank_file, spawned_folder
from samestep.rankenv import variable

__all__: list[str] = []

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def recognise(logs: Path, starter: int, rank: int) -> Path:
    """Gives this process a record and a file for its stacks; returns the folder that holds them.

    Args:
        logs: of this host.
        starter: the launcher's rank that has started it.
        rank: its own.
    """
    folder = spawned_folder(logs, starter)
    folder.mkdir(parents=True, exist_ok=True)
    progress.attach(progress.create_file(rank_file(folder, rank, "progress")))
    stacks = open_private(rank_file(folder, rank, "stacks"), "wb")  # faulthandler keeps it open
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    return folder


def describe_with_spawned(error: BaseException, rank: int) -> FailureRecord:
    """Returns the record of an exception that nobody caught: of the spawned rank that is behind it, if one is."""
    failure = describe(error, rank)
    looks = {"ProcessRaisedException": _raised, "ProcessExitedException": _exited}
    look = looks.get(type(error).__name__)  # torch.multiprocessing may never have been imported
    return failure if look is None else tried(lambda: look(error, failure), failure)


def _raised(error: BaseException, failure: FailureRecord) -> FailureRecord:
    """It holds the text of a traceback, which lies below torch's own frames and above the script's."""
    text = text_in(error).rstrip()
    frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(text)]
    where, source = own_line(traceback.StackSummary.from_list(frames))
    name, _, message = text.rpartition("\n")[2].partition(": ")
    message = f"{cut(message, failure.rank)} ({_who(error)[0]})"
    return replace(failure, exception=name, message=message, where=where, source=source)


def _exited(error: BaseException, failure: FailureRecord) -> FailureRecord:
    who, stacks = _who(error)
    where, source = place_in(stacks)
    name, code = getattr(error, "signal_name", None), getattr(error, "exit_code", 1)
    if name is None:
        message = f"it exited with code {code} without a Python exception ({who})"
        return replace(failure, exception="Exit", message=message, exit_code=code)
    number = abs(code)  # torch has no name for most real-time signals
    return replace(
        failure,
        exception="Signal",
        message=f"it was killed by {signal_name(number)} (signal {number}; {who})",
        signal=number,
        exit_code=128 + number,
        where=where or failure.where,
        source=source or failure.source,
    )


def _who(error: BaseException) -> tuple[str, str]:
    """Returns which spawned process failed, and the stacks that it left."""
    process, logs = getattr(error, "error_pid", 0), variable("SAMESTEP_LOGS")
    for record in [] if logs is None else Path(logs).glob("rank*.spawned/rank*.progress"):
        if progress.read_file(record).process == process:
            stacks = record.with_suffix(".stacks").read_text(encoding="utf-8", errors="replace")
            return f"in its own rank {record.stem.removeprefix('rank')}, process {process}", stacks
    return f"in process {getattr(error, 'error_index', '?')} of those it spawned", ""
