"""Observers watch a rank from inside; SAMESTEP_OBSERVERS names them, "package.module:Name,…".

They begin before the script, and in a rank that the script itself has spawned when it initialises its process group:
before that it is not known to be one.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep import events, progress
from samestep.files import open_private
from samestep.instrument.callbacks import unsubscribe
from samestep.launch.rank import progress_notes
from samestep.launch.rank.import_hooks import when_imported
from samestep.launch.rank.store import served_ports, use_stores_at
from samestep.launch.rank.user_code import STACKS_SIGNAL
from samestep.paths import rank_file, spawned_folder
from samestep.rankenv import variable


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where an observer finds itself.

    `folder` is for its files and may not exist yet, None where none are kept; `spawned` says that the script
    itself has started this rank.
    """

    rank: int
    size: int
    folder: Path | None = None
    spawned: bool = False


class Observer:
    """Watches one rank; every method does nothing until it is overridden."""

    @classmethod
    def ends_ranks_of(cls, starter: int) -> bool:
        """Whether the ranks that the launcher's rank `starter` has spawned are to end before they join any other."""
        del starter
        return False

    def begin(self, context: RankContext) -> None:
        """Called before the script, on the main thread. It must not import torch: see `import_hooks.when_imported`."""

    def end(self, error: BaseException | None) -> None:
        """Called when the script has ended; `error` is what it left uncaught."""


_watching: list[Observer] = []
_starter: list[int] = []  # the launcher's rank that this process descends from; empty in that rank itself


def begin(rank: int, size: int) -> None:
    _watch_children(rank)
    _load(RankContext(rank=rank, size=size, folder=_folder()))


def _watch_children(starter: int) -> None:
    progress_notes.begin(_joined, _joining)
    os.register_at_fork(after_in_child=partial(_forked, starter))
    when_imported("multiprocessing.spawn", partial(_pass_on, starter))


def end(error: BaseException | None) -> None:
    while _watching:
        _watching.pop().end(error)


def _load(context: RankContext) -> None:
    for kind in _kinds():
        observer = kind()
        observer.begin(context)
        _watching.append(observer)


def _kinds() -> Iterator[type[Observer]]:
    for name in filter(None, (variable("SAMESTEP_OBSERVERS") or "").split(",")):
        module, _, attribute = name.partition(":")
        yield getattr(import_module(module), attribute)


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
        return {**original(name), "samestep": _Starter(starter)}

    vars(module)["get_preparation_data"] = get_preparation_data


class _Starter:
    """Part of the data pickled for a child; unpickled there, it is a call of :func:`_begin_spawned`."""

    def __init__(self, starter: int) -> None:
        self._starter = starter

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin_spawned, (self._starter, served_ports())


def _begin_spawned(starter: int, ports: list[str]) -> None:
    _starter[:] = [starter]
    use_stores_at(ports)
    _watch_children(starter)


def _keep_record(logs: Path, starter: int, rank: int) -> Path:
    """Gives this process a progress record and a file for its stacks; returns the folder that holds them."""
    folder = spawned_folder(logs, starter)
    folder.mkdir(parents=True, exist_ok=True)
    progress.attach(progress.create_file(rank_file(folder, rank, "progress")))
    stacks = open_private(rank_file(folder, rank, "stacks"), "wb")  # faulthandler keeps it open
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    return folder


def _joining() -> None:
    """A process group is about to be initialised: ends a spawned rank that no observer records."""
    if _starter and not progress.is_attached() and any(kind.ends_ranks_of(_starter[0]) for kind in _kinds()):
        raise SystemExit(0)


def _joined() -> None:
    """A process group has been initialised here: is this a rank that the script has spawned?"""
    folder = _folder()
    if not _starter or folder is None or progress.is_attached():
        return
    dist = sys.modules["torch.distributed"]
    rank, size = dist.get_rank(), dist.get_world_size()
    own = _keep_record(folder, _starter[0], rank)
    unsubscribe(Observer)  # those of the process that has forked this one
    _load(RankContext(rank=rank, size=size, folder=own, spawned=True))
    if _watching:
        from multiprocessing.util import Finalize  # multiprocessing ends its processes by os._exit

        Finalize(None, end, args=(None,), exitpriority=0)
