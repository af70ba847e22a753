"""One run of a script on N ranks: what `samestep run` does.

plan    commands, variables and files of every rank: pure, shown by --dry-run
launch  prepares the hosts, runs attempts until one is the last, writes run.json, returns the verdict
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from samestep._version import __version__
from samestep.events import EventFile
from samestep.fake_gpus import VARIABLE
from samestep.files import make_private, open_private, write_private
from samestep.launch.bootstrap import RankTask
from samestep.launch.cluster import HostRanks
from samestep.launch.console import Console, say
from samestep.launch.failure import as_json
from samestep.launch.hang import HANG_AFTER_S
from samestep.launch.head import Attempt, Controller, Interruption
from samestep.launch.process import rank_command
from samestep.launch.replacement import Outcome, Replacement
from samestep.launch.restarts import Restarts
from samestep.launch.supervise import DEFAULT_GRACE_S
from samestep.launch.team import Job
from samestep.launch.terminal import is_terminal
from samestep.launch.variables import RankLayout, lay_out, rank_variables, threads_per_rank
from samestep.launch.verdict import RunResult, summary_lines, understood
from samestep.launch.vigil import Note, OnHang
from samestep.paths import RunDirectory, rank_file
from samestep.rankenv import variable

__all__: list[str] = []

TIMELINE = "samestep.launch.timeline:Timeline"
WORTH_A_LOOK = 30.0  # seconds of a run whose report is pointed at


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What is to be started.

    `parts` are the hosts with their ranks: at first this one alone, of several known when they have been examined.
    `local_rank_option` is passed to the script with each rank's local rank, if given; `lost_host` says whether a
    restart goes on with the hosts that are left ("continue"), waits for another in the place of each that is lost
    ("wait"), or does not come to pass ("stop"); `hang_after` and `on_hang` are those of samestep.launch.vigil;
    `observers` are loaded in every rank (samestep.launch.observers), one that keeps `events` among them; with
    `hash_seeds` each rank hashes texts in another way, so that an order which hangs on a set of texts differs between
    ranks every time rather than now and then; `settings` are variables that a plan has chosen.
    """

    parts: tuple[HostRanks, ...]
    directory: RunDirectory
    run_id: str
    program: str
    arguments: tuple[str, ...]
    is_module: bool = False
    local_rank_option: str | None = None
    start: str = "auto"
    pinned: bool = False
    restarts: int = 0
    grace: float = DEFAULT_GRACE_S
    lost_host: str = "stop"
    hang_after: float = HANG_AFTER_S
    on_hang: OnHang = "auto"
    observers: tuple[str, ...] = ()
    events: bool = False
    hash_seeds: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    fake_gpus: int | None = None  # of each host; 0: one for each of its ranks

    @property
    def size(self) -> int:
        """How many ranks there are in all."""
        return sum(part.ranks for part in self.parts)

    def group(self, port: int = 0, attempt: int = 0) -> RankLayout:
        """Returns the ranks and where they meet."""
        return RankLayout(
            size=self.size,
            port=port,
            run_id=self.run_id,
            restarts=attempt,
            most_restarts=self.restarts,
            host=self.parts[0].address,
            places=lay_out([(part.machine, part.ranks) for part in self.parts]),
        )

    def command(self, rank: int) -> list[str]:
        """Returns the command that is one rank in a fresh interpreter, and what a forked one does instead."""
        extra = () if self.local_rank_option is None else (f"{self.local_rank_option}={rank}",)
        program = (self.program, *extra, *self.arguments)
        return rank_command(*RankTask(program=program, is_module=self.is_module).options())

    def variables(self, rank: int, group: RankLayout | None = None) -> dict[str, str]:
        """Returns the variables that one rank gets beside its host's own."""
        group = group or self.group()
        part = self.parts[self.part_of(rank)]
        theirs = rank_variables(replace(group, interface=part.interface), rank, threads=part.threads)
        logs = self.directory.logs(part.machine, group.restarts)
        own = (TIMELINE,) if self.events else ()
        names = [name for name in (variable("SAMESTEP_OBSERVERS"), *own, *self.observers) if name]
        observed = {"SAMESTEP_OBSERVERS": ",".join(names)} if names else {}
        observed |= {"PYTHONHASHSEED": str(rank + 1)} if self.hash_seeds else {}
        return {
            **self.settings,
            **theirs,
            **({} if self.fake_gpus is None else {VARIABLE: str(self.fake_gpus or theirs["LOCAL_WORLD_SIZE"])}),
            **observed,
            "SAMESTEP_RUN_DIR": str(self.directory.path),
            "SAMESTEP_LOGS": str(logs),
        }

    def part_of(self, rank: int) -> int:
        """Returns which part a rank belongs to."""
        ends = list(accumulate(part.ranks for part in self.parts))
        return next(number for number, end in enumerate(ends) if rank < end)

    def jobs(self, group: RankLayout | None = None) -> tuple[Job, ...]:
        """Returns what the ranks of every part run."""
        owners = [self.part_of(rank) for rank in range(self.size)]
        return tuple(
            self._job(tuple(rank for rank, owner in enumerate(owners) if owner == number), group)
            for number in range(len(self.parts))
        )

    def _job(self, ranks: tuple[int, ...], group: RankLayout | None) -> Job:
        here = 0 in ranks and self.parts[0].interface == "lo"
        drawn = [stream for stream, number in (("out", 1), ("err", 2)) if here and is_terminal(number)]
        return Job(
            program=self.program,
            arguments=self.arguments,
            is_module=self.is_module,
            start=self.start,
            local_rank_option=self.local_rank_option,
            drawn=tuple(drawn),
            reads=self.size == 1 and here,
            ranks=ranks,
            variables=tuple(self.variables(rank, group) for rank in ranks),
            pinned=self.pinned,
        )

    def logs(self, attempt: int) -> list[Path]:
        """Returns the directory of every rank's files."""
        return [self.directory.logs(self.parts[self.part_of(rank)].machine, attempt) for rank in range(self.size)]


def local_ranks(ranks: int) -> HostRanks:
    """Returns this host's part of a run that is on no other."""
    name = socket.gethostname()
    return HostRanks(name=name, machine=name, ranks=ranks, threads=threads_per_rank(ranks))


def launch(plan: RunSpec, head: Controller, replacement: Replacement | None = None) -> RunResult:
    """Starts the ranks, waits for them and returns what became of them. Call it from the main thread.

    Args:
        plan: what is to be started.
        head: holds the agents of the plan's parts, in their order.
        replacement: brings back hosts that are lost, where the plan says to wait for them.

    Raises:
        OSError: the run directory cannot be written, or no process can be started.
    """
    make_private(plan.directory.path)
    began = time.time()
    _write_record(plan, began, None, 0)
    restarts = Restarts(plan.restarts)
    verdict = _prepare(plan, head) or _attempt(head, plan, 0)
    while restarts.another(verdict):
        found = _following(plan, head, replacement)
        if not found.parts:
            restarts.withdraw(found.reason)
            verdict = verdict if found.signal is None else _interrupted(verdict, found.signal)
            break
        cause = "\n".join(_cause(plan, verdict, restarts.done - 1))
        say(cause, plain=True)
        blamed = [] if verdict.blamed is None else [verdict.blamed.rank]
        _noting(plan, restarts.done)("restart", 0, cause, blamed)
        plan = replace(plan, parts=found.parts)
        say(f"restart {restarts.done} of {restarts.most}: {_everybody(plan.size)} again")
        verdict = _attempt(head, plan, restarts.done)
    with contextlib.suppress(OSError):
        _write_record(plan, began, verdict, restarts.done)
    if restarts.reason is not None:
        say(restarts.reason)
    say("\n".join(_cause(plan, verdict, restarts.done)), plain=True)
    if verdict.exit_code == 0 and verdict.apart:
        say(
            f"note: the {plan.size} ranks took {verdict.step} steps and joined no process group: each has trained a "
            "model of its own; with samestep.world() and samestep.replicate(…) they train one"
        )
    if verdict.exit_code == 0 and plan.events and time.time() - began > WORTH_A_LOOK:
        say(f"where the time went: samestep report {_shown(plan.directory.path)}")
    head.tell_exit(verdict.exit_code)
    return verdict


def _noting(plan: RunSpec, attempt: int) -> Note:
    """Returns what writes down an event of the launcher's own; there are few, and they are written at once."""

    def note(kind: str, step: int, text: str, ranks: Sequence[int]) -> None:
        file = EventFile(plan.directory.events, None, attempt, at_once=True)
        file.put(kind, step, {"text": text, "ranks": list(ranks)})
        file.close()

    return note


def _prepare(plan: RunSpec, head: Controller) -> RunResult | None:
    """Lets all hosts import what their ranks need; returns the verdict where a signal has broken that off."""
    try:
        with head.between_attempts():
            for note in head.prepare(plan.jobs()):
                say(f"note: {note}")
    except Interruption as interruption:
        number = interruption.args[0]
        return RunResult(exit_code=128 + number, size=plan.size, interrupted=number)
    return None


def _everybody(size: int) -> str:
    return "the rank starts" if size == 1 else f"all {size} ranks start"


def _following(plan: RunSpec, head: Controller, replacement: Replacement | None) -> Outcome:
    """Returns the parts for another attempt, or why there is none."""
    lost = [host.host for host in head.hosts if host.gone]
    if not lost:
        return Outcome(parts=plan.parts)
    if plan.lost_host == "wait" and replacement is not None:
        return replacement.bring_back(lambda parts: head.prepare(replace(plan, parts=parts).jobs()))
    left = tuple(part for part, host in zip(plan.parts, head.hosts, strict=True) if not host.gone)
    if plan.lost_host != "continue" or not left:
        return Outcome(reason=f"not started again: host {', '.join(lost)} is lost, and --lost-host is {plan.lost_host}")
    head.forget_lost()
    return Outcome(parts=left)


def _interrupted(verdict: RunResult, number: int) -> RunResult:
    """Returns the verdict on a run that a signal has ended when it was to be started again."""
    return replace(verdict, exit_code=128 + number, interrupted=number)


def _attempt(head: Controller, plan: RunSpec, number: int) -> RunResult:
    jobs = plan.jobs(plan.group(head.bind(plan.parts[0].address), number))
    console = Console(plan.logs(number), jobs[0].drawn)
    try:
        attempt = Attempt(
            jobs=jobs,
            console=console,
            grace=plan.grace,
            hang_after=plan.hang_after,
            on_hang=plan.on_hang,
            machines=len({part.machine for part in plan.parts}),
            note=_noting(plan, number),
        )
        verdict = head.run(attempt)
    finally:
        console.close()
    with contextlib.suppress(OSError):  # the disk is full, or the script has cleared the folder away
        for failure in verdict.failures:
            logs = plan.logs(number)[failure.rank]
            failure.write(rank_file(logs, failure.rank, "error.json"))
            if failure.in_short:
                said = rank_file(logs, failure.rank, "err")
                with open_private(said, "a", encoding="utf-8", errors="backslashreplace") as log:
                    log.write(failure.traceback)
    return verdict if verdict.blamed is None else understood(verdict, plan.logs(number)[verdict.blamed.rank])


def summary(plan: RunSpec, verdict: RunResult) -> dict[str, Any]:
    """Returns what `--json` says."""
    failure = None if verdict.blamed is None else as_json(verdict.blamed, list(verdict.waiting))
    return {"exit": verdict.exit_code, "run_dir": str(plan.directory.path), "failure": failure}


def _write_record(plan: RunSpec, began: float, verdict: RunResult | None, restarts: int) -> None:
    """Writes run.json, at the start and again at the end; a reader never sees half of it."""
    record = {
        "samestep": __version__,
        "command": [plan.program, *plan.arguments],
        "module": plan.is_module,
        "ranks": plan.size,
        "host": plan.parts[0].machine,
        "hosts": {part.name: part.ranks for part in plan.parts},
        "run_id": plan.run_id,
        "directory": str(Path.cwd()),
        "began": began,
        "restarts": restarts,
        "ended": None if verdict is None else time.time(),
        "exit": None if verdict is None else verdict.exit_code,
        "failure": None if verdict is None else summary(plan, verdict)["failure"],
    }
    write_private(plan.directory.record, json.dumps(record, indent=2) + "\n")


def _cause(plan: RunSpec, verdict: RunResult, attempt: int) -> list[str]:
    logs = plan.logs(attempt)[0 if verdict.blamed is None else verdict.blamed.rank]
    return summary_lines(verdict, _shown(logs))


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
