"""Numbers that a script logs, and the events of a rank that another launcher has started.

`World.log` writes to rankK.events.jsonl on every rank, for samestep report and samestep watch, and on rank 0 to
TensorBoard's files where the world was asked for them. Nothing is reduced.
"""

from __future__ import annotations

import contextlib
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep import events, progress
from samestep.errors import UsageError
from samestep.launch.rank import progress_notes
from samestep.launch.rank.observers import RankContext
from samestep.launch.rank.timeline import Timeline
from samestep.paths import RunDirectory
from samestep.rankenv import variable


def start_event_log(folder: Path | None, rank: int, size: int) -> Timeline | None:
    """Starts to write events to the run directory `folder`, unless a launcher does; the caller ends it."""
    if folder is None or events.is_attached() or variable("SAMESTEP_RUN_DIR") is not None:
        return None
    if not progress.is_attached():
        progress.attach(progress.create())
        os.register_at_fork(after_in_child=progress.detach)
        progress_notes.begin()
    os.register_at_fork(after_in_child=events.detach)
    attempt = int(variable("TORCHELASTIC_RESTART_COUNT") or 0)
    timeline = Timeline()
    timeline.begin(RankContext(rank=rank, size=size, folder=RunDirectory(folder).logs(socket.gethostname(), attempt)))
    return timeline


class MetricLog:
    """Writes what `World.log` is given."""

    def __init__(self, tensorboard: str | Path | None, *, writes: bool) -> None:
        self._calls = 0
        self._writer: Any = None
        if tensorboard is not None and find_spec("tensorboard") is None:
            raise UsageError("world(tensorboard=…) needs tensorboard: pip install 'samestep[track]'")
        if tensorboard is not None and writes:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard))

    def log(self, values: dict[str, Any]) -> None:
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._calls += 1
        progress.log_values({name: value if value - value == 0 else str(value) for name, value in numbers.items()})
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, progress.finished_steps() or self._calls)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk ends no training
                self._writer.close()


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)  # torch warns of a loss with its graph
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        shape = getattr(value, "shape", None)
        given = f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
        raise UsageError(f"log({name}=…) takes a number or a tensor of one element, not {given}") from error
