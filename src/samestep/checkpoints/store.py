"""A checkpoint directory as all ranks see it: rank 0 owns and writes it, every rank reads it, and all agree.

An exception that only rank 0 raises leaves the others waiting in their next collective until it times out. So each
thing done here ends in an exchange, and what failed on one rank is raised on all; but for a write that goes on beside
the training, which rank 0 reports when it hears of it. Where tensors are cut among the ranks, such a write is one of
several ranks, each of its own parts, on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from samestep.checkpoints.directory import (
    CheckpointDirectory,
    RetentionPolicy,
    new_run_id,
    os_error_text,
    read_run_id,
)
from samestep.checkpoints.integrity import latest_intact, read_manifest, verify
from samestep.checkpoints.manifest import Manifest
from samestep.checkpoints.reader import read_tensors
from samestep.checkpoints.sharded_save import LocalShards, ShardedSave
from samestep.checkpoints.writer import AsyncWriter, RemoteWriters, SaveResult, begin_folder, write
from samestep.errors import CheckpointError, PeerError
from samestep.runtime.exchange import broadcast_json, run_on_all_ranks
from samestep.runtime.world import World

_Result = TypeVar("_Result")
Targets = Callable[[Manifest], Mapping[str, Tensor]]  # which tensors are read only in part, as which DTensors are cut


class CheckpointStore:
    """The checkpoints in one directory. Collective, as are its methods but :meth:`poll` and :meth:`close`.

    `run` is the id of the run, equal on all ranks, and known from :meth:`latest` on.
    """

    def __init__(self, path: Path, world: World) -> None:
        self.run = ""
        self.path = path
        self._world = world
        self._writer = AsyncWriter()
        self._sharded = ShardedSave(world)
        self._directory = self.run_on_all(lambda: CheckpointDirectory(path) if world.is_first else None)

    def run_on_all(self, action: Callable[[], _Result]) -> _Result:
        """Returns what ``action`` returns here; if it raises on any rank, all ranks raise.

        Another rank's failure is a CheckpointError, so that a script which catches one does so on every rank.
        """
        try:
            return run_on_all_ranks(self._world.everyone, action)
        except PeerError as error:
            problem = CheckpointError(str(error))
            problem.secondary = True
            raise problem from error

    @property
    def slowest_write(self) -> float:
        """On rank 0, how many seconds the slowest of the last writes took; 0 before the first. Not collective."""
        return max(self._writer.write_seconds, default=0.0)

    def replace_all(self) -> Path | None:
        """Moves all checkpoints out of the way of a run that starts anew; returns where to, None without any."""

        def move() -> str | None:
            folder = None if self._directory is None else self._directory.replace_all()
            return None if folder is None else str(folder)

        moved: str | None = broadcast_json(self._world.everyone, self.run_on_all(move))
        return None if moved is None else Path(moved)

    def latest(self) -> str | None:
        """Returns the name of the newest checkpoint that is intact, or None if there are no checkpoints."""
        found = self.run_on_all(lambda: (None, "") if self._directory is None else _latest(self._directory))
        agreed: tuple[str | None, str, str] = broadcast_json(self._world.everyone, (*found, new_run_id()))
        name, self.run, self._sharded.key = agreed
        return name

    def read(self, name: str, targets: Targets) -> tuple[Manifest, dict[str, Tensor]]:
        """Returns the manifest and the tensors of checkpoint ``name``; see :func:`read_tensors` for the targets."""
        folder = self.path / name

        def visible() -> Manifest:
            if not folder.is_dir():
                raise CheckpointError(f"{folder} is not visible here; all ranks need one and the same directory")
            return read_manifest(folder)

        manifest = self.run_on_all(visible)
        return manifest, self.run_on_all(lambda: read_tensors(folder, manifest, targets(manifest)))

    def start_save(self, manifest: Manifest, shards: LocalShards, retention: RetentionPolicy) -> SaveResult | None:
        """Begins to write rank 0's ``manifest`` and what every rank holds, and then to delete what has expired.

        Waits for the write before it, and returns its result if it was not returned before.
        """
        parts = self._sharded.plan(shards)
        before = self._writer.wait()
        staged = self._writer.stage(shards.tensors_to_write(parts, self._world.rank))
        manifest = replace(manifest, run=self.run, parts=parts)
        if self._directory is not None:
            manifest = replace(manifest, tensors=shards.entries())
        writers = sorted({rank for grid in parts.values() for rank in grid["ranks"]} - {0})
        if writers:
            self._start_sharded(manifest, staged, writers, retention)
        elif (directory := self._directory) is not None:
            self._writer.start(manifest.step, lambda: _write(directory, manifest, staged, retention))
        return before

    def _start_sharded(
        self, manifest: Manifest, staged: dict[str, Tensor], writers: list[int], retention: RetentionPolicy
    ) -> None:
        """Begins a write of several ranks, in a folder that the first makes."""
        directory, step = self._directory, manifest.step
        made: Path | None = None
        problem: CheckpointError | None = None
        if directory is not None:
            try:
                made = begin_folder(directory, manifest, staged)
            except CheckpointError as error:
                problem = error
        folder = broadcast_json(self._world.everyone, None if made is None else str(made))
        if problem is not None:
            self._writer.start(step, lambda: _fail(problem))
        elif folder is not None:
            remote, write_shard = self._sharded.exchange(Path(folder), writers, staged)
            if directory is not None:
                self._writer.start(step, lambda: _write(directory, manifest, staged, retention, remote))
            elif self._world.rank in writers:
                self._writer.start(step, write_shard)

    def wait(self) -> Path | None:
        """Waits for the write under way, and returns its folder; None where there was none."""
        result = self._writer.wait()

        def folder() -> str | None:
            if result is not None and result.error is not None:
                raise result.error
            return None if result is None else str(result.folder)

        agreed: str | None = broadcast_json(self._world.everyone, self.run_on_all(folder))
        return None if agreed is None else Path(agreed)

    def poll(self) -> SaveResult | None:
        """Returns on rank 0 what became of a write that has ended by itself, once. Not collective."""
        return self._writer.poll()

    def close(self, *, after_error: bool = False) -> SaveResult | None:
        """Waits for the write under way and lets another run use the directory; returns what became of the write.

        After an error it does not wait long for ranks that may be gone.
        """
        if after_error:
            self._sharded.shorten_timeout()
        result = self._writer.wait()
        if self._directory is not None:
            self._directory.close()
        return result


def _latest(directory: CheckpointDirectory) -> tuple[str | None, str]:
    """The newest intact checkpoint, and the id of the run that resumes from it; a new one where none does."""
    name = latest_intact(directory)
    if name is None:
        return None, new_run_id()
    known = read_run_id(directory.path) or read_manifest(directory.path / name).run
    return name, known or new_run_id()


def _fail(problem: Exception) -> Path:
    raise problem


def _write(
    directory: CheckpointDirectory,
    manifest: Manifest,
    tensors: dict[str, Tensor],
    retention: RetentionPolicy,
    remote: RemoteWriters | None = None,
) -> Path:
    folder = write(directory, manifest, tensors, remote)
    try:
        verify(folder)  # nothing older is deleted on trust
    except CheckpointError as error:
        raise CheckpointError(f"saved {folder}, but it does not read back as it was in memory: {error}") from error
    try:
        directory.prune(retention)
    except OSError as error:
        raise CheckpointError(f"saved {folder}, but cannot delete an older one: {os_error_text(error)}") from error
    return folder
