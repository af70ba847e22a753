"""The runs that a verification is made of: N ranks that are recorded, and the script alone beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from samestep.launch.fork import fork_blocker, read_source
from samestep.launch.nursery import PreforkServer
from samestep.launch.variables import threads_per_rank
from samestep.verification import machine, runs
from samestep.verification.files import Files
from samestep.verification.judging.record import Record, read
from samestep.verification.judging.single import Run

__all__: list[str] = []

_ALONE = "samestep.verification.reference.alone:Alone"
_RECORDER = "samestep.verification.recording.recorder:Recorder"

_STILL_S = 10.0  # after which it is said that nothing moves, and again after as many seconds more
_FREE_S = 20.0  # for a port that a run needs, and another program has: a training, or a run beside this one

_AT_ONCE = 2  # runs of the script alone, side by side

Say = Callable[[str], None]


@contextmanager
def nursery_for(script: runs.Script, ranks: int) -> Iterator[PreforkServer | None]:
    """What forks the runs of a script, with the string hashes of rank 0; None where it must not find torch imported."""
    source = read_source(script.program, is_module=script.is_module)
    if script.mpi or fork_blocker(source):
        yield None
        return
    modules = [name.partition(":")[0] for name in (_RECORDER, _ALONE)]
    nursery = PreforkServer({"PYTHONHASHSEED": "1", **runs.alike(threads_per_rank(ranks))}, modules)
    try:
        yield nursery
    finally:
        nursery.close()


@dataclass
class _Runs:
    """How many runs have begun, and how many are planned: the ranks and the script alone, if nothing is looked into."""

    planned: int = 2
    begun: int = 0
    _lock: Lock = field(default_factory=Lock)

    def begin(self) -> int:
        """Returns the number of the run that begins."""
        with self._lock:
            self.begun += 1
            return self.begun


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs one script again and again, each time in processes and a folder of its own.

    Attributes:
        script: what is run.
        ranks: how many are compared with one process; every process of every run gets the threads of one of them.
        folder: where all runs leave their files.
        still_s: seconds without a sign of life until a run counts as hung.
        say: is told what goes on.
        files: keeps the files of the runs apart.
        nursery: forks the runs that need no fresh interpreters; None where all do.
    """

    script: runs.Script
    ranks: int
    folder: Path
    still_s: float
    say: Say
    files: Files
    nursery: PreforkServer | None = None
    _is_over: Event = field(default_factory=Event)
    _runs: _Runs = field(default_factory=_Runs)

    def plan(self, runs: int) -> None:
        """Says that so many runs more will be made, for the count that `say` is told."""
        self._runs.planned += runs

    def side_by_side(self, run: Callable[[int], Run], ranks: Sequence[int]) -> list[Run]:
        """Returns what `run` gives for each rank, two runs at a time; a signal to this process ends those under way."""
        self.plan(len(ranks))
        with ThreadPoolExecutor(1 if self.files.are_shared else _AT_ONCE) as pool:
            try:
                return list(pool.map(run, ranks))
            except BaseException:
                self._is_over.set()  # the pool waits for its threads, and they for runs of any length
                raise

    def recorded(self, name: str, ranks: int, **order: Any) -> Run:
        """Runs the script on so many ranks, recorded; `order` is for :class:`Recorder`."""
        self._begin(name)
        return self._run(name, ranks, _RECORDER, {"steps": None, **order}, self.nursery)

    def first(self, steps: int, passes: int, *, keep_all: bool = False) -> Run:
        """Records the ranks in fresh interpreters, each with string hashes of its own: no order may depend on them.

        Args:
            steps: of an optimizer that are recorded.
            passes: over the data that may be ended early behind them.
            keep_all: whether the values of every step are kept.
        """
        name = f"recording {self.ranks} ranks" if passes else f"recording {self.ranks} ranks, and whole passes"
        name += ", with the values of every step" if keep_all else ""
        self._begin(name)
        return self._run(name, self.ranks, _RECORDER, {"steps": steps, "passes": passes, "keep_all": keep_all}, None)

    def alone(self, name: str, record: Record, ranks: list[int] | None = None, **order: Any) -> Run:
        """Runs it in one process on what `ranks` have used, by default all; `order` is for :class:`Alone`."""
        chosen = [rank.number for rank in record.data.ranks] if ranks is None else ranks
        told = {"recorded": str(record.folder), "ranks": chosen, "together": record.size, **order}
        self._begin(f"the script alone, {name}")
        return self._run(name, 1, _ALONE, told, self.nursery)

    def _begin(self, name: str) -> None:
        number = self._runs.begin()
        self.say(f"run {number} of {max(number, self._runs.planned)}: {name}")

    def _run(self, name: str, *how: Any) -> Run:
        """Runs it; once more where it has failed for a port, if that is known to be free by then or not known."""
        run = self._once(name, *how)
        port = machine.taken_port(run.ended)
        if not run.ended.found_port_taken or (port is not None and not machine.comes_free(port, _FREE_S)):
            return run
        self.say(f"{name}: once more, for a port was taken")
        return self._once(f"{name}, once more", *how)

    def _once(
        self,
        name: str,
        ranks: int,
        observer: str,
        order: dict[str, Any],
        nursery: PreforkServer | None,
    ) -> Run:
        folder = self.folder / name.replace(" ", "-").replace(",", "")
        with self.files.apart(folder.name) as (variables, files):
            ended = runs.run(
                self.script,
                ranks,
                folder,
                observer,
                {"saves": str(folder / "saves"), **files, **order},
                still_s=self.still_s,
                threads=threads_per_rank(self.ranks),
                variables=variables,
                nursery=None if nursery is None or nursery.objection() or nursery.has_ended() else nursery,
                progress=self._check_over,
                stillness=_Told(name, self.still_s, self.say).look,
            )
        return Run(ended, read(folder / "journals"))

    def _check_over(self, _: Path) -> None:
        if self._is_over.is_set():
            raise KeyboardInterrupt


class _Told:
    """Tells of a run in which nothing moves, now and then."""

    def __init__(self, name: str, still_s: float, say: Say) -> None:
        self._name, self._still_s, self._say = name, still_s, say
        self._told = 0

    def look(self, still: float) -> None:
        """Says it, `still` seconds after the last sign of life, unless it has just been said."""
        times = int(still / _STILL_S)
        if times > self._told:
            self._say(f"{self._name}: no progress for {still:.0f} s; after {self._still_s:g} s it has hung")
        self._told = times
