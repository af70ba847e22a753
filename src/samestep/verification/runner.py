"""The runs that a verification is made of: N ranks that are recorded, and the script alone beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.launch.variables import threads_per_rank
from samestep.verification import runs
from samestep.verification.judging.record import Record, read
from samestep.verification.judging.single import Run

__all__: list[str] = []

_ALONE = "samestep.verification.reference.alone:Alone"
_RECORDER = "samestep.verification.recording.recorder:Recorder"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs one script again and again, each time in processes and a folder of its own.

    Attributes:
        script: what is run.
        ranks: how many are compared with one process; every process of every run gets the threads of one of them.
        folder: where all runs leave their files.
        still_s: seconds without a sign of life until a run counts as hung.
        say: is told what goes on.
    """

    script: runs.Script
    ranks: int
    folder: Path
    still_s: float
    say: Say

    def recorded(
        self, name: str, ranks: int, *, progress: Callable[[Path], None] = lambda _: None, **order: Any
    ) -> Run:
        """Runs the script on so many ranks, recorded; `order` is for :class:`Recorder`."""
        self.say(name)
        return self._run(name, ranks, _RECORDER, {"steps": None, **order}, progress)

    def alone(self, name: str, record: Record, ranks: list[int] | None = None, **order: Any) -> Run:
        """Runs it in one process on what `ranks` have used, by default all; `order` is for :class:`Alone`."""
        chosen = [rank.number for rank in record.ranks] if ranks is None else ranks
        told = {"recorded": str(record.folder), "ranks": chosen, "together": record.size, **order}
        self.say(f"running the script alone: {name}")
        return self._run(name, 1, _ALONE, told)

    def _run(
        self,
        name: str,
        ranks: int,
        observer: str,
        order: dict[str, Any],
        progress: Callable[[Path], None] = lambda _: None,
    ) -> Run:
        folder = self.folder / name.replace(" ", "-").replace(",", "")
        ended = runs.run(
            self.script,
            ranks,
            folder,
            observer,
            {"saves": str(folder / "saves"), **order},
            still_s=self.still_s,
            threads=threads_per_rank(self.ranks),
            progress=progress,
        )
        return Run(ended, read(folder / "journals"))
