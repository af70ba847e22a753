"""Restores the files that a script writes: every run finds them as the first run did.

Each run gets an overlay of the folders that the script may write to (:mod:`samestep.launch.overlay`). Where there is
none, ranks note what they write (:mod:`samestep.verification.recording.writes`), and it is restored behind the run.
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


def written_folders(words: Sequence[str], program: Path | None) -> list[Path]:
    """Returns the folders that a script may write to: the working directory, its own, and those of its arguments.

    Of these, `--out=PATH` names a path too. A module has no `program`.
    """
    named = (Path(word.partition("=")[2] if word.startswith("-") else word) for word in words if "/" in word)
    found = [Path.cwd(), *([program.absolute().parent] if program is not None else [])]
    found += [path.absolute() for path in named if path.is_dir()]
    return [folder for folder in dict.fromkeys(one.resolve() for one in found) if os.access(folder, os.W_OK)]


@dataclass
class Files:
    """The files of a script, restored after each run."""

    folders: Sequence[Path]  # that the script may write to
    folder: Path  # of the verification, which all runs may write to; what they write elsewhere is kept below "files"
    # whether a run has written where there is no overlay: then no run may start before another has ended
    are_shared: bool = False
    lost: set[str] = field(default_factory=set)  # files that a run has changed and that could not be put back

    def __post_init__(self) -> None:
        """Leaves out folders that contain the verification's own, where ranks and this process exchange files."""
        around = self.folder.resolve()
        self.folders = [folder for folder in self.folders if not around.is_relative_to(folder)]

    @contextlib.contextmanager
    def separate(self, name: str) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
        """Yields environment variables and recorder options for a run; restores the files at its end."""
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
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in written.glob("*.json")]
        self.are_shared |= any(one["kind"] != "folder" for one in notes)
        for number, one in enumerate(sorted(notes, key=lambda one: len(one["path"]), reverse=True)):  # files first
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
        """Returns a remark for the report; None where all files were restored."""
        names = ", ".join(sorted(self.lost)[:3])
        return f"the script has changed or moved files that could not be put back: {names}" if self.lost else None


def _put_back(copy: str, path: Path) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the script may have removed the folder too
        shutil.copy2(copy, path)
    except OSError:
        return False
    return True
