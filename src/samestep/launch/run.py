"""One run of a script on N ranks: what `samestep run` does.

plan    commands, variables and files of every rank: pure, shown by --dry-run
launch  prepares the hosts, runs attempts until one is the last, writes run.json, returns the verdict
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep._version import __version__
from samestep.launch.bootstrap import Assignment
from samestep.launch.console import Console
from samestep.launch.failure import as_json
from samestep.launch.head import Attempt, Head, open_here
from samestep.launch.process import rank_command
from samestep.launch.restarts import Restarts
from samestep.launch.supervise import SAVING
from samestep.launch.team import Job
from samestep.launch.terminal import is_terminal
from samestep.launch.variables import Group, rank_variables
from samestep.launch.verdict import Verdict, explain
from samestep.paths import RunDirectory

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be started. `local_rank_option` is passed to the script with each rank's local rank, if given."""

    group: Group
    directory: RunDirectory
    program: str
    arguments: tuple[str, ...]
    is_module: bool = False
    local_rank_option: str | None = None
    host: str = socket.gethostname()
    start: str = "auto"
    restarts: int = 0
    grace: float = SAVING

    def command(self, rank: int) -> list[str]:
        """Returns the command that is one rank in a fresh interpreter, and what a forked one does instead."""
        extra = () if self.local_rank_option is None else (f"{self.local_rank_option}={rank}",)
        program = (self.program, *extra, *self.arguments)
        return rank_command(*Assignment(program=program, is_module=self.is_module).options())

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the variables that one rank gets beside the caller's own."""
        return {**rank_variables(self.group, rank), "SAMESTEP_RUN_DIR": str(self.directory.path)}

    def job(self) -> Job:
        """Returns what the ranks of this host run."""
        size = self.group.size
        return Job(
            program=self.program,
            arguments=self.arguments,
            is_module=self.is_module,
            start=self.start,
            local_rank_option=self.local_rank_option,
            drawn=tuple(stream for stream, number in (("out", 1), ("err", 2)) if is_terminal(number)),
            reads=size == 1,
            ranks=tuple(range(size)),
            variables=tuple(self.variables(rank) for rank in range(size)),
        )


def launch(plan: Plan) -> Verdict:
    """Starts the ranks, waits for them and returns what became of them. Call it from the main thread.

    Raises:
        OSError: the run directory cannot be written, or no process can be started.
    """
    plan.directory.path.mkdir(parents=True, exist_ok=True)
    began = time.time()
    _write_record(plan, began, None, 0)
    restarts = Restarts(plan.restarts)
    with Head([open_here(plan.host, plan.group.size)]) as head:
        for note in head.prepare([plan.job()]):
            _say(f"note: {note}")
        verdict = _attempt(head, plan, 0)
        while restarts.another(verdict):
            _say("\n".join(_cause(plan, verdict, restarts.done - 1)), plain=True)
            _say(f"restart {restarts.done} of {restarts.most}: all {plan.group.size} ranks, from the last checkpoint")
            verdict = _attempt(head, plan, restarts.done)
    _write_record(plan, began, verdict, restarts.done)
    if restarts.reason is not None:
        _say(restarts.reason)
    _say("\n".join(_cause(plan, verdict, restarts.done)), plain=True)
    return verdict


def _attempt(head: Head, plan: Plan, number: int) -> Verdict:
    group = replace(plan.group, port=head.bind(plan.group.host), restarts=number, most_restarts=plan.restarts)
    job = replace(plan, group=group).job()
    with _console(plan, number, job.drawn) as console:
        verdict = head.run(Attempt(jobs=(job,), console=console, grace=plan.grace))
    for failure in verdict.failures:
        failure.write(plan.directory.error(plan.host, failure.rank, number))
    return verdict


@contextmanager
def _console(plan: Plan, attempt: int, drawn: tuple[str, ...]) -> Iterator[Console]:
    console = Console([plan.directory.logs(plan.host, attempt)] * plan.group.size, drawn)
    try:
        yield console
    finally:
        console.close()


def summary(plan: Plan, verdict: Verdict) -> dict[str, Any]:
    """Returns what `--json` says."""
    failure = None if verdict.blamed is None else as_json(verdict.blamed, list(verdict.waiting))
    return {"exit": verdict.exit_code, "run_dir": str(plan.directory.path), "failure": failure}


def _write_record(plan: Plan, began: float, verdict: Verdict | None, restarts: int) -> None:
    """Writes run.json, at the start and again at the end; a reader never sees half of it."""
    record = {
        "samestep": __version__,
        "command": [plan.program, *plan.arguments],
        "module": plan.is_module,
        "ranks": plan.group.size,
        "host": plan.host,
        "run_id": plan.group.run_id,
        "directory": str(Path.cwd()),
        "began": began,
        "restarts": restarts,
        "ended": None if verdict is None else time.time(),
        "exit": None if verdict is None else verdict.exit_code,
        "failure": None if verdict is None else summary(plan, verdict)["failure"],
    }
    draft = plan.directory.record.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draft.replace(plan.directory.record)


def _cause(plan: Plan, verdict: Verdict, attempt: int) -> list[str]:
    logs = plan.directory.logs(plan.host, attempt)
    shown = logs.relative_to(Path.cwd()) if logs.is_relative_to(Path.cwd()) else logs
    return explain(verdict, shown)


def _say(text: str, *, plain: bool = False) -> None:
    sys.stderr.write(text + "\n" if plain else f"samestep: {text}\n")
    sys.stderr.flush()
