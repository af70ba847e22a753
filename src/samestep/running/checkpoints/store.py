"""A checkpoint directory as all ranks see it: rank 0 owns and writes it, every rank reads it, and all agree.

An exception that only rank 0 raises leaves the others waiting in their next collective until it times out. So each
thing done here ends in an exchange, and what failed on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from samestep.errors import CheckpointError, PeerError
from samestep.running.checkpoints.directory import Directory, reason
from samestep.running.checkpoints.format import Manifest
from samestep.running.checkpoints.reader import newest_good, read_manifest, read_tensors
from samestep.running.checkpoints.writer import write
from samestep.runtime.exchange import agree, tell_json
from samestep.runtime.world import World

__all__ = ["Store"]

_Result = TypeVar("_Result")


class Store:
    """The checkpoints in one directory. Collective, as are its methods but :meth:`close`.

    Raises:
        CheckpointError: the directory cannot be used, or another live run uses it.
    """

    def __init__(self, path: Path, world: World) -> None:
        self._path = path
        self._world = world
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

    def newest(self) -> str | None:
        """Returns the name of the newest checkpoint that is intact, or None if there are no checkpoints."""
        directory = self._directory
        name = self.together(lambda: None if directory is None else newest_good(directory))
        told: str | None = tell_json(self._world.everyone, name)
        return told

    def read(self, name: str) -> tuple[Manifest, dict[str, Tensor]]:
        """Returns the manifest and the tensors of checkpoint ``name``, on the CPU."""
        return self.together(lambda: self._read(self._path / name))

    def write(self, manifest: Manifest, tensors: dict[str, Tensor], keep: int) -> Path:
        """Writes rank 0's ``manifest`` and ``tensors``, then deletes all but the ``keep`` newest checkpoints."""
        folder = self.together(lambda: self._write(manifest, tensors, keep))
        return Path(tell_json(self._world.everyone, folder))

    def close(self) -> None:
        """Lets another run use the directory."""
        if self._directory is not None:
            self._directory.close()

    def _agree(self, problem: Exception | None) -> None:
        try:
            agree(self._world.everyone, problem)
        except PeerError as error:
            told = CheckpointError(str(error))
            told.secondary = True
            raise told from error

    def _read(self, folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not visible here; all ranks need one and the same directory")
        manifest = read_manifest(folder)
        return manifest, read_tensors(folder, manifest)

    def _write(self, manifest: Manifest, tensors: dict[str, Tensor], keep: int) -> str | None:
        if self._directory is None:
            return None
        folder = write(self._directory, manifest, tensors)
        try:
            self._directory.prune(keep)
        except OSError as error:
            raise CheckpointError(f"saved {folder}, but cannot delete an older one: {reason(error)}") from error
        return str(folder)
