"""What watches a rank from inside, beside the launcher's own notes: loaded here, named by the command that wants it.

    SAMESTEP_OBSERVERS   "package.module:Name,…"; each Name() is an Observer
    SAMESTEP_LOGS        the folder of this host's files in this attempt

    begin   in a rank of the launcher: before the script. In a rank that the script itself has spawned: as soon as
            it has initialised its process group, for not before that is it known to be one
    end     when the script, or the spawned function, has ended

A command that records, checks or draws a run adds an observer, never a second way into the ranks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep import events, progress
from samestep.instrument.callbacks import unsubscribe
from samestep.launch import progress_notes
from samestep.launch.address import served_ports, use_stores_at
from samestep.launch.imports import when_imported
from samestep.launch.spawned import recognise
from samestep.rankenv import variable

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where an observer finds itself.

    `folder` is for its files and may not exist yet, None where nobody keeps any; `spawned` says that the script
    itself has started this rank.
    """

    rank: int
    size: int
    folder: Path | None = None
    spawned: bool = False


class Observer:
    """Watches one rank; every method does nothing until it is overridden."""

    def begin(self, seat: RankContext) -> None:
        """Called before the script, on the main thread. It must not import torch: see `imports.when_imported`."""

    def end(self, error: BaseException | None) -> None:
        """Called when the script has ended; `error` is what it left uncaught."""


_watching: list[Observer] = []
_starter: list[int] = []  # the launcher's rank that this process descends from; empty in that rank itself


def begin(rank: int, size: int) -> None:
    """Watches this rank of the launcher, and whatever it starts by multiprocessing."""
    progress_notes.begin(_joined)
    os.register_at_fork(after_in_child=partial(_forked, rank))
    when_imported("multiprocessing.spawn", partial(_pass_on, rank))
    _load(RankContext(rank=rank, size=size, folder=_folder()))


def end(error: BaseException | None) -> None:
    """Tells all observers that the script has ended."""
    while _watching:
        _watching.pop().end(error)


def _load(seat: RankContext) -> None:
    for name in filter(None, (variable("SAMESTEP_OBSERVERS") or "").split(",")):
        module, _, attribute = name.partition(":")
        observer: Observer = getattr(import_module(module), attribute)()
        observer.begin(seat)
        _watching.append(observer)


def _folder() -> Path | None:
    folder = variable("SAMESTEP_LOGS")
    return None if folder is None else Path(folder)


# --- ranks that the script starts by itself --------------------------------------------------


def _forked(starter: int) -> None:
    """In a child of a rank: what belongs to the rank is not its own."""
    progress.detach()
    events.detach()
    _watching.clear()
    _starter[:] = [starter]


def _pass_on(starter: int, module: ModuleType) -> None:
    """Lets a fresh interpreter of multiprocessing begin by taking notes too."""
    original = vars(module)["get_preparation_data"]

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "samestep": _Seed(starter)}

    vars(module)["get_preparation_data"] = get_preparation_data


class _Seed:
    """Pickled among what a child is told; unpickled there, it is a call of :func:`_begin_spawned`."""

    def __init__(self, starter: int) -> None:
        self._starter = starter

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin_spawned, (self._starter, served_ports())


def _begin_spawned(starter: int, ports: list[str]) -> None:
    _starter[:] = [starter]
    use_stores_at(ports)
    progress_notes.begin(_joined)
    when_imported("multiprocessing.spawn", partial(_pass_on, starter))
    os.register_at_fork(after_in_child=partial(_forked, starter))


def _joined() -> None:
    """A process group has been initialised here: is this a rank that the script has spawned?"""
    folder = _folder()
    if not _starter or folder is None or progress.is_attached():
        return
    dist = sys.modules["torch.distributed"]
    rank, size = dist.get_rank(), dist.get_world_size()
    own = recognise(folder, _starter[0], rank)
    unsubscribe(Observer)  # those of the process that has forked this one
    _load(RankContext(rank=rank, size=size, folder=own, spawned=True))
    if _watching:
        from multiprocessing.util import Finalize  # whose processes leave by no other door

        Finalize(None, end, args=(None,), exitpriority=0)
