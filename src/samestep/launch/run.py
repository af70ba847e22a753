"""One run of a script on N ranks of this machine: what `samestep run` does.

plan    commands, variables and files of every rank: pure, shown by --dry-run
launch  starts them, watches them, writes run.json, returns the verdict
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from samestep._version import __version__
from samestep.launch.address import listen_on_loopback
from samestep.launch.console import Channel, open_channel, open_screens
from samestep.launch.failure import as_json
from samestep.launch.process import Process, rank_command, reap, start
from samestep.launch.supervise import Supervisor
from samestep.launch.terminal import copy_size, is_terminal, open_terminal
from samestep.launch.variables import Group, rank_variables
from samestep.launch.verdict import Verdict, explain
from samestep.paths import RunDirectory, Stream
from samestep.rankenv import child_environment

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

    def command(self, rank: int, store: int | None) -> list[str]:
        """Returns one rank's command; `store` is the inherited socket on which it serves the store, if it does."""
        options = ["--error", str(self.directory.error(self.host, rank))]
        options += [] if store is None else ["--store", str(store)]
        extra = [] if self.local_rank_option is None else [f"{self.local_rank_option}={rank}"]
        module = ["-m"] if self.is_module else []
        return [*rank_command(*options), *module, self.program, *extra, *self.arguments]

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the variables that one rank gets beside the caller's own."""
        return {**rank_variables(self.group, rank), "SAMESTEP_RUN_DIR": str(self.directory.path)}


def launch(plan: Plan) -> Verdict:
    """Starts the ranks, waits for them and returns what became of them. Call it from the main thread.

    Raises:
        OSError: the run directory cannot be written, or no process can be started.
    """
    plan.directory.logs(plan.host).mkdir(parents=True)
    began = time.time()
    _write_record(plan, began, None)
    with listen_on_loopback() as listener:
        plan = replace(plan, group=replace(plan.group, port=listener.getsockname()[1]))
        ranks = _Ranks(plan)
        with ranks:
            for rank in range(plan.group.size):
                ranks.start(rank, listener.fileno())
    with ranks:  # the socket is rank 0's alone by now: when it ends, peers are refused rather than left waiting
        verdict = ranks.watch()
    _write_record(plan, began, verdict)
    _say(plan, verdict)
    return verdict


class _Ranks:
    """The processes of a plan, with the streams that come from them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.screens = open_screens()
        self.processes: list[Process] = []
        self.channels: list[Channel] = []
        self.terminals: list[tuple[int, int]] = []  # (the real one, the master of rank 0's)

    def start(self, rank: int, listener: int) -> None:
        sinks = {stream: self._open(rank, stream) for stream in self.screens}
        first = rank == 0
        self.processes.append(
            start(
                self.plan.command(rank, listener if first else None),
                child_environment(self.plan.variables(rank)),
                keep=(listener,) if first else (),
                stdin=None if self.plan.group.size == 1 else subprocess.DEVNULL,
                stdout=sinks["out"],
                stderr=sinks["err"],
            )
        )
        for sink in sinks.values():
            os.close(sink)

    def _open(self, rank: int, stream: Stream) -> int:
        """Returns the end of a stream that the rank writes to; the other goes to a channel."""
        screen = self.screens[stream]
        drawn = rank == 0 and is_terminal(screen.descriptor)
        source, sink = open_terminal(screen.descriptor) if drawn else os.pipe()
        if drawn:
            self.terminals.append((screen.descriptor, source))
        log = self.plan.directory.log(self.plan.host, rank, stream)
        prefixed = self.plan.group.size > 1 and not drawn
        self.channels.append(open_channel(rank, stream, source, screen, prefixed=prefixed, log=log))
        return sink

    def watch(self) -> Verdict:
        records = [self.plan.directory.error(self.plan.host, rank) for rank in range(len(self.processes))]
        verdict = Supervisor(self.processes, self.channels, records, self._resize).wait()
        for screen in self.screens.values():
            if is_terminal(screen.descriptor):
                screen.tidy()
        return verdict

    def _resize(self) -> None:
        for real, master in self.terminals:
            copy_size(real, master)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for process in self.processes:
                reap(process)


def summary(plan: Plan, verdict: Verdict) -> dict[str, Any]:
    """Returns what `--json` says."""
    failure = None if verdict.blamed is None else as_json(verdict.blamed, list(verdict.waiting))
    return {"exit": verdict.exit_code, "run_dir": str(plan.directory.path), "failure": failure}


def _write_record(plan: Plan, began: float, verdict: Verdict | None) -> None:
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
        "ended": None if verdict is None else time.time(),
        "exit": None if verdict is None else verdict.exit_code,
        "failure": None if verdict is None else summary(plan, verdict)["failure"],
    }
    draft = plan.directory.record.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draft.replace(plan.directory.record)


def _say(plan: Plan, verdict: Verdict) -> None:
    logs = plan.directory.logs(plan.host)
    shown = logs.relative_to(Path.cwd()) if logs.is_relative_to(Path.cwd()) else logs
    sys.stderr.write("\n".join(explain(verdict, shown)) + "\n")
    sys.stderr.flush()
