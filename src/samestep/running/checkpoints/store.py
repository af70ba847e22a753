"""A checkpoint directory as all ranks see it: rank 0 owns and writes it, every rank reads it, and all agree.

An exception that only rank 0 raises leaves the others waiting in their next collective until it times out. So each
thing done here ends in an exchange, and what failed on one rank is raised on all; but for a write that goes on beside
the training, which rank 0 reports when it hears of it. Where tensors are cut among the ranks, such a write is one of
several ranks, each of its own parts, on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from samestep.errors import CheckpointError, PeerError
from samestep.running.checkpoints import identity
from samestep.running.checkpoints.background import Background, Outcome
from samestep.running.checkpoints.directory import Directory, Keep, reason
from samestep.running.checkpoints.format import Manifest
from samestep.running.checkpoints.reader import newest_good, read_manifest, read_tensors, verify
from samestep.running.checkpoints.shares import Holding, Shares
from samestep.running.checkpoints.writer import Others, start, write
from samestep.runtime.exchange import broadcast_json, raise_on_all_ranks
from samestep.runtime.world import World

__all__ = ["Store"]

_Result = TypeVar("_Result")
Moulds = Callable[[Manifest], Mapping[str, Tensor]]  # which tensors are read only in part, as which DTensors are cut


class Store:
    """The checkpoints in one directory. Collective, as are its methods but :meth:`news` and :meth:`close`.

    Attributes:
        run: the name of the run, equal on all ranks; known from :meth:`newest` on.

    Raises:
        CheckpointError: the directory cannot be used, or another live run uses it.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.run = ""
        self._path = path
        self._world = world
        self._background = Background()
        self._shares = Shares(world)
        self._directory = self.together(lambda: Directory(path) if world.is_first else None)

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Returns what ``action`` returns here; if it raises on any rank, all ranks raise.

        Another rank's failure is a CheckpointError, so that a script which catches one does so on every rank.
        """
        problem: Exception | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  (handed to every rank, and raised here by _agree)
            problem = error
        self._agree(problem)
        return result

    @property
    def slowest_write(self) -> float:
        """On rank 0, how many seconds the slowest of the last writes took; 0 before the first. Not collective."""
        return max(self._background.took, default=0.0)

    def newest(self) -> str | None:
        """Returns the name of the newest checkpoint that is intact, or None if there are no checkpoints."""
        found = self.together(lambda: (None, "") if self._directory is None else _newest(self._directory))
        told: tuple[str | None, str, str] = broadcast_json(self._world.everyone, (*found, identity.drawn()))
        name, self.run, self._shares.about = told
        return name

    def read(self, name: str, moulds: Moulds) -> tuple[Manifest, dict[str, Tensor]]:
        """Returns the manifest and the tensors of checkpoint ``name``; see :func:`read_tensors` for the moulds."""
        folder = self._path / name
        manifest = self.together(lambda: _manifest(folder))
        return manifest, self.together(lambda: read_tensors(folder, manifest, moulds(manifest)))

    def begin(self, manifest: Manifest, holding: Holding, keep: Keep) -> Outcome | None:
        """Begins to write rank 0's ``manifest`` and what every rank holds, and then to delete what ``keep`` lets go.

        Returns:
            What became of the write before it, which is waited for, where nobody has been told yet.
        """
        parts = self._shares.plan(holding)
        before = self._background.wait()
        held = self._background.hold(holding.share(parts, self._world.rank))
        manifest = replace(manifest, run=self.run, parts=parts)
        if self._directory is not None:
            manifest = replace(manifest, tensors=holding.described())
        writers = sorted({rank for grid in parts.values() for rank in grid["ranks"]} - {0})
        if writers:
            self._begin_together(manifest, held, writers, keep)
        elif (directory := self._directory) is not None:
            self._background.start(manifest.step, lambda: _write(directory, manifest, held, keep))
        return before

    def _begin_together(self, manifest: Manifest, held: dict[str, Tensor], writers: list[int], keep: Keep) -> None:
        """Begins a write of several ranks, in a folder that the first makes."""
        directory, step = self._directory, manifest.step
        made = None if directory is None else _made(directory, manifest, held)
        told = broadcast_json(self._world.everyone, str(made) if isinstance(made, Path) else None)
        if isinstance(made, Exception):
            self._background.start(step, partial(_fail, made))
        elif told is not None:
            others, write_share = self._shares.post(Path(told), writers, held)
            if directory is not None:
                self._background.start(step, lambda: _write(directory, manifest, held, keep, others))
            elif self._world.rank in writers:
                self._background.start(step, write_share)

    def settle(self) -> Path | None:
        """Waits for the write under way, and returns its folder; None where there was none."""
        outcome = self._background.wait()

        def folder() -> str | None:
            if outcome is not None and outcome.error is not None:
                raise outcome.error
            return None if outcome is None else str(outcome.folder)

        told: str | None = broadcast_json(self._world.everyone, self.together(folder))
        return None if told is None else Path(told)

    def news(self) -> Outcome | None:
        """Returns on rank 0 what became of a write that has ended by itself, once. Not collective."""
        return self._background.poll()

    def close(self, *, hurry: bool = False) -> Outcome | None:
        """Waits for the write under way and lets another run use the directory; returns what became of the write.

        In a hurry it does not wait long for ranks that may be gone.
        """
        if hurry:
            self._shares.hurry()
        outcome = self._background.wait()
        if self._directory is not None:
            self._directory.close()
        return outcome

    def _agree(self, problem: Exception | None) -> None:
        try:
            raise_on_all_ranks(self._world.everyone, problem)
        except PeerError as error:
            told = CheckpointError(str(error))
            told.secondary = True
            raise told from error


def _manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not visible here; all ranks need one and the same directory")
    return read_manifest(folder)


def _newest(directory: Directory) -> tuple[str | None, str]:
    """The newest good checkpoint, and the name of the run that goes on from it; a new one where none does."""
    name = newest_good(directory)
    if name is None:
        return None, identity.drawn()
    known = identity.read(directory.path) or read_manifest(directory.path / name).run
    return name, known or identity.drawn()


def _made(directory: Directory, manifest: Manifest, held: dict[str, Tensor]) -> Path | Exception:
    try:
        return start(directory, manifest, held)
    except CheckpointError as error:
        return error


def _fail(problem: Exception) -> Path:
    raise problem


def _write(
    directory: Directory, manifest: Manifest, tensors: dict[str, Tensor], keep: Keep, others: Others | None = None
) -> Path:
    folder = write(directory, manifest, tensors, others)
    verify(folder)  # nothing older is deleted on trust
    try:
        directory.prune(keep)
    except OSError as error:
        raise CheckpointError(f"saved {folder}, but cannot delete an older one: {reason(error)}") from error
    return folder
