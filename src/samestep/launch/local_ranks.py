"""The ranks of one host: started, watched, given commands, and cleared away; the controller decides."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from samestep import progress
from samestep.launch.cpus import pin, read_cores
from samestep.launch.event_loop import Loop
from samestep.launch.link import Link
from samestep.launch.process import (
    Process,
    children,
    exit_status,
    kill_orphans,
    mpi_channel,
    reap,
    restore_file_limit,
    signal_alone,
    signal_group,
    start,
)
from samestep.launch.rank.bootstrap import RankTask
from samestep.launch.rank.control import RankProcess
from samestep.launch.rank.failure import death
from samestep.launch.rank.user_code import STACKS_SIGNAL, UNKNOWN
from samestep.launch.resources import out_of_memory_kills
from samestep.launch.start.fork import fork, fork_blocker, preimport, read_source
from samestep.rankenv import child_environment, set_variables, variable

OUTPUT_FLAGS = 1  # index into what tcgetattr(3) returns
CHUNK = 1 << 16  # bytes read at a time
LAST_READS = 4  # of a rank that has ended: more than a pipe holds; what comes later is not of the rank


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks of one host run. It travels as JSON.

    `start` is "fork", "spawn" or "auto"; `variables` are each rank's own; `drawn` are the streams of rank 0 that get
    a terminal; `reads` says that the only rank reads the launcher's standard input, `pinned` that each gets cores of
    its own.
    """

    program: str
    arguments: tuple[str, ...]
    is_module: bool = False
    start: str = "auto"
    local_rank_option: str | None = None
    drawn: tuple[str, ...] = ()
    reads: bool = False
    ranks: tuple[int, ...] = ()
    variables: tuple[dict[str, str], ...] = ()
    pinned: bool = False


class _LocalRank(RankProcess):
    def __init__(
        self, rank: int, process: Process, pipe: Link, stacks: IO[bytes], record: int, outputs: dict[int, str]
    ) -> None:
        super().__init__(rank, process.pid, pipe, stacks.fileno(), record)
        self.process = process
        self.stacks_file = stacks  # which is closed with it
        self.outputs = outputs  # descriptor: "out" or "err"
        self.ended = False


class LocalRanks:
    """The ranks of one host; `send` passes their messages on: the kind, bytes of output, and the body by name."""

    def __init__(self, loop: Loop, send: Callable[..., None]) -> None:
        self._loop = loop
        self._send = send
        self._ranks: dict[int, _LocalRank] = {}
        self._terminals: list[tuple[int, int]] = []  # (the real one, the master of rank 0's)
        self._killed = 0  # out-of-memory kills of the kernel when the ranks were started
        self._paused = False  # the ranks' output is not read

    # --- start ------------------------------------------------------------------------------------

    def prepare(self, job: Job) -> str | None:
        """Gets ready to fork, if that is asked for and possible; returns what a person should know, or None."""
        self._forks = False
        if job.start == "spawn" or (job.start == "auto" and len(job.ranks) == 1):
            return None
        source = read_source(job.program, is_module=job.is_module)
        wanted = job.variables[0].get("OMP_NUM_THREADS", variable("OMP_NUM_THREADS"))
        obstacle = None
        if "torch" in sys.modules and variable("OMP_NUM_THREADS") != wanted:
            obstacle = f"torch was imported for {variable('OMP_NUM_THREADS')} threads and not for {wanted}"
        set_variables({"OMP_NUM_THREADS": wanted})
        folder = Path.cwd() if job.is_module else Path(job.program).resolve().parent
        if job.start == "auto":
            obstacle = obstacle or fork_blocker(source)
        obstacle = obstacle or preimport(source, folder)
        self._forks = obstacle is None
        return f"{job.program} starts in fresh interpreters: {obstacle}" if obstacle else None

    def start(self, job: Job, listener: socket.socket | None) -> None:
        """Starts all ranks; the first serves the store on `listener`, if there is one."""
        self._killed = out_of_memory_kills()  # of an earlier attempt, say
        for local_rank in range(len(job.ranks)):
            self._start(job, local_rank, listener if local_rank == 0 else None)
        if listener is not None:
            listener.close()  # rank 0's alone by now: when it ends, peers are refused rather than left waiting

    def _start(self, job: Job, local_rank: int, listener: socket.socket | None) -> None:
        rank, variables = job.ranks[local_rank], job.variables[local_rank]
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the rank)
        record = progress.create()
        outputs, sinks = self._open_streams(job, rank)
        option = [] if job.local_rank_option is None else [f"{job.local_rank_option}={variables['LOCAL_RANK']}"]
        task = RankTask(
            program=(job.program, *option, *job.arguments),
            is_module=job.is_module,
            control=theirs.fileno(),
            stacks=stacks.fileno(),
            store=None if listener is None else listener.fileno(),
            progress=record,
        )
        channel = mpi_channel() if len(job.ranks) == 1 else []
        environment, out, err = child_environment(variables), sinks["out"], sinks["err"]
        process: Process
        if self._forks:
            stdin = 0 if job.reads else None
            process = fork(task, environment, stdin=stdin, stdout=out, stderr=err, keep=channel)
        else:
            stdin = None if job.reads else subprocess.DEVNULL
            keep = [*task.descriptors(), *channel]
            process = start(task.command(), environment, keep=keep, stdin=stdin, stdout=out, stderr=err)
            restore_file_limit(process.pid)
        theirs.close()
        for sink in sinks.values():
            os.close(sink)
        if job.pinned:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, pin(read_cores(), len(job.ranks), local_rank))
        self._watch(_LocalRank(rank, process, Link(ours), stacks, record, outputs))

    def _open_streams(self, job: Job, rank: int) -> tuple[dict[int, str], dict[str, int]]:
        outputs, sinks = {}, {}
        for stream, real in (("out", 1), ("err", 2)):
            drawn = rank == 0 and stream in job.drawn
            source, sink = _open_terminal(real) if drawn else os.pipe()
            if drawn:
                self._terminals.append((real, source))
            outputs[source], sinks[stream] = stream, sink
        return outputs, sinks

    def _watch(self, one: _LocalRank) -> None:
        self._ranks[one.rank] = one
        handle = os.pidfd_open(one.process.pid)
        self._loop.watch(handle, lambda: self._on_end(one, handle))
        self._loop.watch(one.pipe.fileno(), lambda: self._receive(one))
        for descriptor in one.outputs:
            os.set_blocking(descriptor, False)
        self._watch_outputs(one)

    # --- output and messages ------------------------------------------------------------------------

    def _watch_outputs(self, one: _LocalRank) -> None:
        for descriptor in one.outputs:
            if self._paused:
                self._loop.forget(descriptor)
            else:
                self._loop.watch(descriptor, partial(self._forward, one, descriptor))

    def pause(self, *, pause: bool) -> None:
        """Reads the ranks' output no more, or again; they wait when their pipes are full."""
        self._paused = pause
        for one in self._ranks.values():
            self._watch_outputs(one)

    def _forward(self, one: _LocalRank, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the other side of a pseudo-terminal is closed
            data = b""
        if data:
            self._send("output", data, rank=one.rank, stream=one.outputs[descriptor])
            return True
        self._close_output(one, descriptor)
        return False

    def _forward_rest(self, one: _LocalRank) -> None:
        for descriptor in list(one.outputs):
            for _ in range(LAST_READS):
                if not self._forward(one, descriptor):
                    break

    def _close_output(self, one: _LocalRank, descriptor: int) -> None:
        self._loop.forget(descriptor)
        del one.outputs[descriptor]
        self._terminals = [(real, master) for real, master in self._terminals if master != descriptor]
        os.close(descriptor)

    def _receive(self, one: _LocalRank) -> None:
        one.receive(lambda kind, body: self._send(kind, rank=one.rank, **body))
        if one.pipe.closed:
            self._loop.forget(one.pipe.fileno())

    def _on_end(self, one: _LocalRank, handle: int) -> None:
        self._loop.forget(handle)
        os.close(handle)
        code = exit_status(one.process)
        assert code is not None
        one.ended = True
        self._receive(one)
        self._forward_rest(one)
        show = partial(self._send, "output", rank=one.rank, stream="err")
        place = one.place_of_death(show) if code < 0 else UNKNOWN
        died = death(one.rank, one.process.pid, code, place, of_memory=self._was_killed_for_memory(code))
        self._send("ended", **one.end_message(code, asdict(died)))

    def _was_killed_for_memory(self, code: int) -> bool:
        return code == -signal.SIGKILL and out_of_memory_kills() > self._killed

    # --- commands -----------------------------------------------------------------------------------

    def command(self, what: str, ranks: Iterable[int], number: int = 0) -> None:
        """Gives a command to those of `ranks` that are here and alive.

        `stop`, `preempt`, `flight` and `write_stacks` go over the control pipe, `signal` to the ranks alone,
        `terminate` and `kill` to all that they have started too; `dump_stacks` makes those write their stacks that have
        not done so since they were last sent, `position` sends them.

        `number` is of the signal; with `stop` it is the exit code, 0 for that of one ended by SIGTERM.
        """
        for one in [self._ranks[rank] for rank in ranks if rank in self._ranks]:
            if what in {"stop", "preempt", "flight", "write_stacks"}:
                one.pipe.send({"kind": what, "number": number})
            elif what == "signal":
                signal_alone(one.process, number)
            elif what == "dump_stacks":
                if not one.has_new_stacks():
                    signal_alone(one.process, STACKS_SIGNAL)
            elif what == "position":
                stacks, body = one.position()
                self._send("position", stacks, **body)
            else:
                signal_group(one.process, signal.SIGTERM if what == "terminate" else signal.SIGKILL)

    def show_pace(self, text: str) -> None:
        if 0 in self._ranks:
            self._ranks[0].pipe.send({"kind": "pace", "text": text})

    def records(self) -> dict[int, tuple[int, progress.Progress]]:
        alive = [one for one in self._ranks.values() if not one.ended]
        return {one.rank: (one.process.pid, one.progress()) for one in alive}

    def resize(self) -> None:
        for real, master in self._terminals:
            _copy_size(real, master)

    # --- cleanup ------------------------------------------------------------------------------------

    def cleanup(self) -> None:
        """Ends whatever the ranks, all of which must have ended, have left."""
        for one in self._ranks.values():
            signal_group(one.process, signal.SIGKILL)
            one.process.wait()
        kill_orphans()
        for one in self._ranks.values():
            self._forward_rest(one)  # the writers of what is still in the pipes are gone
        for one in self._ranks.values():
            for descriptor in list(one.outputs):
                self._close_output(one, descriptor)
            self._loop.forget(one.pipe.fileno())
            one.pipe.close()
            one.stacks_file.close()
            os.close(one.record)
        self._ranks.clear()
        self._terminals.clear()

    def reap_strays(self) -> None:
        """Reaps what ranks had started and left, and what has ended since: it has come to this process."""
        own = {one.process.pid for one in self._ranks.values()}
        for process in set(children(os.getpid())) - own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)

    def kill_all(self) -> None:
        for one in self._ranks.values():
            reap(one.process)
        kill_orphans()


# --- the terminal of rank 0 -----------------------------------------------------------------------


def _open_terminal(like: int) -> tuple[int, int]:
    """Returns (master, slave) of a new pseudo-terminal as large as `like`, which passes bytes unchanged.

    A program asks `isatty()` before it draws a progress display; behind a pipe it would not.
    """
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[OUTPUT_FLAGS] &= ~termios.OPOST  # the real terminal turns \n into \r\n; twice would show in the logs
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    _copy_size(like, master)
    return master, slave


def _copy_size(like: int, master: int) -> None:
    size = fcntl.ioctl(like, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    fcntl.ioctl(master, termios.TIOCSWINSZ, size)
