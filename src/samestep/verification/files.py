"""Every run of a script finds the files as the first run found them, and a verification leaves them so.

A script that saves and resumes would otherwise train on in the second run. Each run gets an overlay of the folders
that the script may write to (:mod:`samestep.launch.overlay`). Where the kernel does not allow it, as in most
containers, and for paths elsewhere, ranks note what they write before they do
(:mod:`samestep.verification.recording.writes`); it is taken away, or put back, when the run has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.launch.overlay import RESULT, VARIABLE

__all__: list[str] = []


def written_folders(words: Sequence[str], program: Path | None) -> list[Path]:
    """Returns the folders that a script may write to: the working directory, its own, and those of its arguments.

    Args:
        words: its arguments; `--out=PATH` names a path too.
        program: its file; None for a module.
    """
    named = (Path(word.partition("=")[2] if word.startswith("-") else word) for word in words if "/" in word)
    found = [Path.cwd(), *([program.absolute().parent] if program is not None else [])]
    found += [path.absolute() for path in named if path.is_dir()]
    return [folder for folder in dict.fromkeys(one.resolve() for one in found) if os.access(folder, os.W_OK)]


@dataclass
class Files:
    """Keeps the files of several runs apart.

    Attributes:
        folders: that the script may write to.
        folder: of the verification, which all runs may write to; what they write elsewhere is kept below "files".
        are_shared: whether a run has written where there is no overlay: then no run may start before another has ended.
        lost: files that a run has changed and that could not be put back.
    """

    folders: Sequence[Path]
    folder: Path
    are_shared: bool = False
    lost: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Leaves out folders around the verification's own: the ranks and this process exchange files there."""
        around = self.folder.resolve()
        self.folders = [folder for folder in self.folders if not around.is_relative_to(folder)]

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
        """Yields variables for the launcher of a run, and what its ranks are ordered; restores the files at the end."""
        overlay, written = self.folder / "files" / name / "overlay", self.folder / "files" / name / "written"
        written.mkdir(parents=True)
        folders = [str(folder) for folder in self.folders]
        try:
            variables = {VARIABLE: json.dumps({"folders": folders, "store": str(overlay)})} if folders else {}
            yield (
                variables,
                {
                    "written": str(written),
                    "unnoted": str(self.folder),
                    "overlay": [str(overlay / RESULT), *folders],
                },
            )
        finally:
            self._restore(written)

    def _restore(self, written: Path) -> None:
        told = [json.loads(path.read_text(encoding="utf-8")) for path in written.glob("*.json")]
        self.are_shared |= any(one["kind"] != "folder" for one in told)
        for number, one in enumerate(sorted(told, key=lambda one: len(one["path"]), reverse=True)):  # files first
            path = Path(one["path"])
            if one["kind"] == "folder":
                with contextlib.suppress(OSError):
                    path.rmdir()  # it stays if another program has put a file there
            elif one["kind"] == "new":
                with contextlib.suppress(OSError):  # the script has removed it
                    shutil.move(path, written / f"{number}.new")
            elif one["kind"] == "moved" or one["copy"] is None or not _put_back(one["copy"], path):
                self.lost.add(one["path"])

    def remark(self) -> str | None:
        """Returns what a person should know of the files; None where all are as before."""
        names = ", ".join(sorted(self.lost)[:3])
        return f"the script has changed or moved files that could not be put back: {names}" if self.lost else None


def _put_back(copy: str, path: Path) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the script may have removed the folder too
        shutil.copy2(copy, path)
    except OSError:
        return False
    return True
