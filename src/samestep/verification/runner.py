"""The runs of a verification: the ranks that are recorded, and the script alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from samestep.fake_gpus import requested
from samestep.launch.rank.environment import threads_per_rank
from samestep.launch.resources import visible_gpus
from samestep.launch.start.fork import fork_blocker, read_source
from samestep.launch.start.prefork_server import PreforkServer
from samestep.rankenv import variable
from samestep.text import format_duration
from samestep.verification import machine, runs
from samestep.verification.files import Files
from samestep.verification.judging.record import Record, Run, read

_REPLAY = "samestep.verification.reference.replay:Replay"
_RECORDER = "samestep.verification.recording.recorder:Recorder"

_LONG_S = 60.0  # of a recording, after which it is said how to shorten the next runs
_STILL_S = 10.0  # after which it is said that nothing moves, and again after as many seconds more
_FREE_S = 20.0  # for a port that a run needs, and another program has: a training, or a run beside this one

_AT_ONCE = 2  # runs of the script alone, side by side

Say = Callable[[str], None]


def gpus_of_one(ranks: int) -> dict[str, str]:
    """Returns the variables with which one process sees as many GPUs as each of so many ranks has.

    Programs divide batch sizes and sums by the number of GPUs that they see, and take all of them for their world.
    """
    count = requested() or visible_gpus()
    named = [name for name in (variable("CUDA_VISIBLE_DEVICES") or "").split(",") if name]
    gpus = named[:count] or [str(index) for index in range(count)]
    share = max(1, len(gpus) // ranks)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:share])} if share < len(gpus) else {}


@contextmanager
def fork_server_for(script: runs.Script, ranks: int) -> Iterator[PreforkServer | None]:
    """Yields the server that forks the runs of a script; None where the script must be the first to import torch."""
    source = read_source(script.program, is_module=script.is_module)
    if script.mpi or fork_blocker(source):
        yield None
        return
    modules = [name.partition(":")[0] for name in (_RECORDER, _REPLAY)]
    fork_server = PreforkServer({"PYTHONHASHSEED": "1", **runs.shared_variables(threads_per_rank(ranks))}, modules)
    try:
        yield fork_server
    finally:
        fork_server.close()


@dataclass(kw_only=True)
class Runner:
    """Runs one script again and again, each time in processes and a folder of its own."""

    script: runs.Script  # what is run
    ranks: int  # how many are compared with one process; every process of every run gets the threads of one of them
    folder: Path  # where all runs leave their files
    still_s: float  # seconds without a sign of life until a run counts as hung
    say: Say  # is told what goes on
    files: Files  # keeps the files of the runs apart
    fork_server: PreforkServer | None = None  # forks the runs that need no fresh interpreters; None where all do
    left_out: list[str] = field(default_factory=list)  # lines of optimizers of which no run takes notice
    batch_after_batch: bool = False  # whether one process gets the ranks' batches one after the other, and not joined
    strided: bool = False  # whether each rank takes drawn[rank::world_size] of what all draw for the whole batch
    gpus_of_one: dict[str, str] = field(default_factory=dict)  # variables that show one process a rank's GPUs alone
    _is_over: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)
    _planned: int = 3  # runs: the ranks, the script alone, and at its own pace, if nothing is looked into
    _begun: int = 0

    def plan(self, runs: int) -> None:
        """Adds to the number of runs that `say` reports."""
        self._planned += runs

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
        return self._run(name, ranks, _RECORDER, {"steps": None, **order}, self.fork_server)

    def first(self, steps: int, passes: int, *, keep_all: bool = False, goes_on: bool = False) -> Run:
        """Records the ranks in fresh interpreters, each with string hashes of its own: no order may depend on them.

        So many steps are recorded; behind them so many passes over the data are ended early.
        """
        whole, values = "" if passes else ", and whole passes", ", with the values of every step" if keep_all else ""
        which = ", what all of them train" if self.left_out else ""
        name = f"recording {self.ranks} ranks{which}{whole}{values}{f' for {steps} steps' if goes_on else ''}"
        self._begin(name)
        began = time.monotonic()
        run = self._run(name, self.ranks, _RECORDER, {"steps": steps, "passes": passes, "keep_all": keep_all}, None)
        if (taken := time.monotonic() - began) > _LONG_S:
            self.say(f"this took {format_duration(taken)}, as each further run may: --steps K compares fewer steps")
        return run

    def alone(self, name: str, record: Record, ranks: list[int] | None = None, **order: Any) -> Run:
        """Runs it in one process on what `ranks` have used, by default all; `order` is for :class:`Replay`."""
        chosen = [rank.number for rank in record.data.ranks] if ranks is None else ranks
        order = {"recorded": str(record.folder), "ranks": chosen, "together": record.size, **order}
        order |= {"batch_after_batch": True} if self.batch_after_batch else {}
        order |= {"strided": True} if self.strided else {}
        self._begin(f"the script alone, {name}")
        run = self._run(name, 1, _REPLAY, order, self.fork_server)
        if self.gpus_of_one and record.steps and not run.steps:  # it may insist on more GPUs
            self.gpus_of_one = {}
            self.say(f"the script alone, {name}: once more, with all GPUs")
            run = self._run(f"{name}, with all GPUs", 1, _REPLAY, order, self.fork_server)
        return run

    def started_twice(self, step: int, first: dict[str, Any], second: dict[str, Any]) -> tuple[Run, Run]:
        """Records the ranks until one is killed behind `step` steps, and a second start that finds their files."""
        with self.files.separate("started-twice") as held:
            name = f"rank 0 is killed behind step {step - 1}"
            self._begin(name)
            killed = self._run(name, self.ranks, _RECORDER, first, self.fork_server, held)
            name = "a second start, behind the kill"
            self._begin(name)
            return killed, self._run(name, self.ranks, _RECORDER, second, self.fork_server, held)

    def _begin(self, name: str) -> None:
        with self._lock:
            self._begun += 1
            number = self._begun
        of_all = f"{number} of {self._planned}" if number <= self._planned else f"{number}, added"
        self.say(f"run {of_all}: {name}")

    def _run(self, name: str, *how: Any) -> Run:
        """Runs the script, and again where it has failed for a port that is free by then, or not known."""
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
        fork_server: PreforkServer | None,
        held: tuple[dict[str, str], dict[str, Any]] | None = None,
    ) -> Run:
        """Runs it once, on files of its own, or on those that are `held` for several runs."""
        folder = self.folder / name.replace(" ", "-").replace(",", "")
        with self.files.separate(folder.name) if held is None else nullcontext(held) as (variables, files):
            ended = runs.run(
                self.script,
                ranks,
                folder,
                observer,
                {"saves": str(folder / "saves"), "left_out": self.left_out, **files, **order},
                still_s=self.still_s,
                threads=threads_per_rank(self.ranks),
                variables=variables | (self.gpus_of_one if ranks == 1 else {}),
                fork_server=None
                if fork_server is None or fork_server.why_unavailable() or fork_server.has_ended()
                else fork_server,
                progress=self._progress(name),
            )
        return Run(ended, read(folder / "journals"))

    def _progress(self, name: str) -> Callable[[Path, float], None]:
        """Returns what is called while a run goes on: it says every ten seconds that nothing moves."""
        said = 0

        def look(_: Path, still: float) -> None:
            nonlocal said
            if self._is_over.is_set():
                raise KeyboardInterrupt
            times = int(still / _STILL_S)
            if times > said:
                self.say(f"{name}: nothing new for {still:.0f} s; {self.still_s:g} s count as a hang (--timeout)")
            said = times

        return look
