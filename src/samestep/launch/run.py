"""One run of a script on N ranks: what `samestep run` does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep._version import __version__
from samestep.errors import SamestepError
from samestep.events import EventFile
from samestep.fake_gpus import VARIABLE
from samestep.files import make_private, open_private, write_private
from samestep.launch.controller import Controller, Interruption
from samestep.launch.hosts.join import Replacement
from samestep.launch.hosts.preflight import HostRanks
from samestep.launch.local_ranks import Job
from samestep.launch.monitor.hang import HANG_AFTER_S
from samestep.launch.monitor.watchdog import Note, OnHang
from samestep.launch.output.console import Console, say
from samestep.launch.rank.bootstrap import RankTask
from samestep.launch.rank.environment import RankLayout, RankPlace, rank_places, rank_variables, threads_per_rank
from samestep.launch.rank.failure import lost_host
from samestep.launch.result import RunResult, explain_gloo_abort, summary_lines
from samestep.launch.supervisor import DEFAULT_GRACE_S
from samestep.paths import RunDirectory, rank_file
from samestep.rankenv import variable

TIMELINE = "samestep.launch.rank.timeline:Timeline"
REPORT_AFTER_S = 30.0  # of a run whose report is pointed at
SAME_STEP = 3  # failures of one step in a row after which it is held to be the step's own fault
USAGE = 2  # the exit code of what only the caller can fix


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What is to be started.

    `parts` are the hosts with their ranks: at first this one alone, of several known when they have been examined.
    `local_rank_option` is passed to the script with each rank's local rank, if given; `lost_host` says whether a
    restart goes on with the hosts that are left ("continue"), waits for another in the place of each that is lost
    ("wait"), or does not come to pass ("stop"); `hang_after` and `on_hang` are the watchdog's; `observers` are loaded
    in every rank, one that keeps `events` among them; with `hash_seeds` each rank hashes texts in another way, so that
    an order which depends on a set of texts differs between ranks every time rather than now and then; `settings` are
    variables that a plan has chosen.
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
        return len(self.owners)

    @cached_property
    def owners(self) -> list[HostRanks]:
        return [part for part in self.parts for _ in range(part.ranks)]

    @cached_property
    def _places(self) -> list[RankPlace]:
        return rank_places([(part.machine, part.ranks) for part in self.parts])

    def layout(self, port: int = 0, attempt: int = 0) -> RankLayout:
        return RankLayout(
            size=self.size,
            port=port,
            run_id=self.run_id,
            restarts=attempt,
            most_restarts=self.restarts,
            host=self.parts[0].address,
        )

    def command(self, rank: int) -> list[str]:
        """Returns the command that is one rank in a fresh interpreter, and what a forked one does instead."""
        extra = () if self.local_rank_option is None else (f"{self.local_rank_option}={self._places[rank].local_rank}",)
        return RankTask(program=(self.program, *extra, *self.arguments), is_module=self.is_module).command()

    def variables(self, rank: int, layout: RankLayout | None = None) -> dict[str, str]:
        layout, part = layout or self.layout(), self.owners[rank]
        theirs = rank_variables(layout, rank, self._places[rank], threads=part.threads, interface=part.interface)
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
            "SAMESTEP_LOGS": str(self.directory.logs(part.machine, layout.restarts)),
        }

    def jobs(self, layout: RankLayout | None = None) -> tuple[Job, ...]:
        jobs, first = [], 0
        for part in self.parts:
            here = first == 0 and part.interface == "lo"
            drawn = [stream for stream, number in (("out", 1), ("err", 2)) if here and os.isatty(number)]
            ranks = tuple(range(first, first + part.ranks))
            first += part.ranks
            job = Job(
                program=self.program,
                arguments=self.arguments,
                is_module=self.is_module,
                start=self.start,
                local_rank_option=self.local_rank_option,
                drawn=tuple(drawn),
                reads=self.size == 1 and here,
                ranks=ranks,
                variables=tuple(self.variables(rank, layout) for rank in ranks),
                pinned=self.pinned,
            )
            jobs.append(job)
        return tuple(jobs)

    def logs(self, attempt: int) -> list[Path]:
        return [self.directory.logs(part.machine, attempt) for part in self.owners]


def local_ranks(ranks: int) -> HostRanks:
    name = socket.gethostname()
    return HostRanks(name=name, machine=name, ranks=ranks, threads=threads_per_rank(ranks))


def launch(spec: RunSpec, controller: Controller, replacement: Replacement | None = None) -> RunResult:
    """Starts the ranks, waits for them and returns what became of them. Call it from the main thread.

    The controller holds the agents of the spec's parts, in their order; `replacement` brings back hosts that are lost,
    where the spec says to wait for them.

    Raises:
        OSError: the run directory cannot be written, or no process can be started.
    """
    make_private(spec.directory.path)
    began = time.time()
    _write_record(spec, began, None, 0)
    restarts, failed_at = 0, list[int]()
    reason: str | None = None  # why there is no other attempt although some are left
    result = _prepare(spec, controller) or _attempt(controller, spec, 0)
    while result.exit_code and result.root_cause and result.interrupted is None and restarts < spec.restarts:
        failed_at.append(result.step)
        culprits = [result.root_cause.rank]
        reason = _why_no_restart(result, failed_at)
        if reason is not None:
            break
        try:
            parts = _next_hosts(spec, controller, replacement)
        except Interruption as interruption:
            number = interruption.args[0]
            result = replace(result, exit_code=128 + number, interrupted=number)
            break
        except SamestepError as error:
            reason = f"not started again: {error}"
            break
        cause = "\n".join(_last_lines(spec, result, restarts))
        restarts += 1
        say(cause, plain=True)
        _note_writer(spec, restarts)("restart", 0, cause, culprits)
        before, spec = spec.size, replace(spec, parts=parts)
        everybody = "the rank starts" if spec.size == 1 else f"all {spec.size} ranks start"
        fewer = "" if spec.size == before else f", {before} before"
        say(f"restart {restarts} of {spec.restarts}: {everybody} again{fewer}")
        result = _attempt(controller, spec, restarts)
    with contextlib.suppress(OSError):
        _write_record(spec, began, result, restarts)
    if reason is not None:
        say(reason)
    say("\n".join(_last_lines(spec, result, restarts)), plain=True)
    if result.exit_code == 0 and result.never_communicated:
        say(
            f"note: the {spec.size} ranks took {result.step} steps and joined no process group: each has trained a "
            "model of its own; with samestep.world() and samestep.replicate(…) they train one"
        )
    if result.exit_code == 0 and spec.events and time.time() - began > REPORT_AFTER_S:
        say(f"where the time went: samestep report {_relative(spec.directory.path)}")
    for host in controller.hosts:  # agents that are commands of their own end as the run has ended
        host.send("run_ended", exit=result.exit_code)
    return result


def _why_no_restart(result: RunResult, failed_at: list[int]) -> str | None:
    assert result.root_cause is not None
    recent = failed_at[-SAME_STEP:]
    if result.root_cause.exit_code == USAGE and result.root_cause.usage:
        return "no restart: this error must be fixed first"
    if len(recent) == SAME_STEP and len(set(recent)) == 1:
        place = f"after step {result.step}" if result.step else "before the first step"
        return f"not started again: {SAME_STEP} attempts in a row have failed {place}"
    return None


def _note_writer(spec: RunSpec, attempt: int) -> Note:
    """Returns what writes down an event of the launcher's own; there are few, and they are written at once."""

    def note(kind: str, step: int, text: str, ranks: Sequence[int]) -> None:
        file = EventFile(spec.directory.events, None, attempt, at_once=True)
        file.put(kind, step, {"text": text, "ranks": list(ranks)})
        file.close()

    return note


def _prepare(spec: RunSpec, controller: Controller) -> RunResult | None:
    """Lets all hosts import what ranks need; returns the result where a signal, or a lost host, breaks that off."""
    try:
        with controller.between_attempts():
            for note in controller.prepare(spec.jobs()):
                say(f"note: {note}")
    except Interruption as interruption:
        number = interruption.args[0]
        return RunResult(exit_code=128 + number, size=spec.size, interrupted=number)
    except SamestepError as error:
        return _without_a_host(controller, spec.size, error)
    return None


def _without_a_host(controller: Controller, size: int, error: SamestepError) -> RunResult:
    """Returns the result of a run that loses a host before its ranks begin; raises `error` where all are there."""
    first = 0  # rank of a host
    for host in controller.hosts:
        if host.gone:
            return RunResult(exit_code=1, size=size, root_cause=lost_host(first, host.host, host.fault))
        first += host.count
    raise error


def _next_hosts(spec: RunSpec, controller: Controller, replacement: Replacement | None) -> tuple[HostRanks, ...]:
    lost = [host.host for host in controller.hosts if host.gone]
    if not lost:
        return spec.parts
    if spec.lost_host == "wait" and replacement is not None:
        return replacement.bring_back(lambda parts: controller.prepare(replace(spec, parts=parts).jobs()))
    left = tuple(part for part, host in zip(spec.parts, controller.hosts, strict=True) if not host.gone)
    if spec.lost_host != "continue" or not left:
        raise SamestepError(f"host {', '.join(lost)} is lost, and --lost-host is {spec.lost_host}")
    controller.forget_lost()
    return left


def _attempt(controller: Controller, spec: RunSpec, number: int) -> RunResult:
    try:
        port = controller.bind(spec.parts[0].address)
    except SamestepError as error:
        return _without_a_host(controller, spec.size, error)
    jobs = spec.jobs(spec.layout(port, number))
    logs = spec.logs(number)
    console = Console(logs, jobs[0].drawn)
    try:
        result = controller.run(
            jobs,
            console,
            grace=spec.grace,
            hang_after=spec.hang_after,
            on_hang=spec.on_hang,
            machines=len({part.machine for part in spec.parts}),
            note=_note_writer(spec, number),
        )
    finally:
        console.close()
    with contextlib.suppress(OSError):  # the disk is full, or the script has cleared the folder away
        for failure in result.failures:
            failure.write(rank_file(logs[failure.rank], failure.rank, "error.json"))
            if failure.in_short:
                output = rank_file(logs[failure.rank], failure.rank, "err")
                with open_private(output, "a", encoding="utf-8", errors="backslashreplace") as log:
                    log.write(failure.traceback)
    return result if result.root_cause is None else explain_gloo_abort(result, logs[result.root_cause.rank])


def summary(spec: RunSpec, result: RunResult) -> dict[str, Any]:
    cause = result.root_cause
    failure = None if cause is None else cause.as_json(list(result.lost_peer_ranks))
    return {"exit": result.exit_code, "run_dir": str(spec.directory.path), "failure": failure}


def _write_record(spec: RunSpec, began: float, result: RunResult | None, restarts: int) -> None:
    record = {
        "samestep": __version__,
        "command": [spec.program, *spec.arguments],
        "module": spec.is_module,
        "ranks": spec.size,
        "host": spec.parts[0].machine,
        "hosts": {part.name: part.ranks for part in spec.parts},
        "run_id": spec.run_id,
        "directory": str(Path.cwd()),
        "began": began,
        "restarts": restarts,
        "ended": None if result is None else time.time(),
        "exit": None if result is None else result.exit_code,
        "failure": None if result is None else summary(spec, result)["failure"],
    }
    write_private(spec.directory.record, json.dumps(record, indent=2) + "\n")


def _last_lines(spec: RunSpec, result: RunResult, attempt: int) -> list[str]:
    cause = result.root_cause
    of_ranks = spec.logs(attempt)
    logs = _relative(of_ranks[0 if cause is None else cause.rank])
    if cause is None and len(set(of_ranks)) > 1:  # of several hosts
        logs = logs.parent
    if (words := misplaced(spec)) and cause is not None and (cause.exception, cause.exit_code) == ("SystemExit", 2):
        option, program = " ".join(words), f"{'-m ' if spec.is_module else ''}{spec.program}"
        said = f"{spec.program} does not take {option}, and options of samestep run stand before the script"
        return [f"samestep: error: {said}: samestep run {option} {program}", f"    logs: {logs}"]
    return summary_lines(result, logs)


def misplaced(spec: RunSpec) -> tuple[str, ...]:
    """Returns the number of processes that stands behind the script: `-n 2` in `samestep run train.py -n 2`."""
    for place, word in enumerate(spec.arguments if spec.size == 1 else ()):
        if word.partition("=")[0] in {"-n", "--nproc-per-node", "--nproc_per_node"}:
            return spec.arguments[place : place + (1 if "=" in word else 2)]
    return ()


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
