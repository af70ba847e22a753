"""The ranks of one host: started, listened to, given orders, and cleared away.

    start    forked or as fresh interpreters, each with pipes for its output and a control pipe
    tell     whatever happens, as one message each (see samestep.launch.agent)
    order    stop | preempt | signal | terminate | kill, to any of them
    clear    after the last has ended: what they had started and left behind

A team decides nothing: whoever holds the run does (samestep.launch.supervise), on this host or another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from samestep import progress
from samestep.launch.bootstrap import RankTask
from samestep.launch.control import Pipe
from samestep.launch.cores import pin, read_cores
from samestep.launch.failure import death, text_of
from samestep.launch.fork import fork, fork_blocker, read_source, warm
from samestep.launch.limits import lower_again
from samestep.launch.loop import Loop
from samestep.launch.memory import out_of_memory_kills
from samestep.launch.process import (
    Process,
    children,
    end_orphans,
    exit_status,
    mpi_channel,
    rank_command,
    reap,
    signal_alone,
    signal_group,
    start,
)
from samestep.launch.stacks import STACKS_SIGNAL, place_in
from samestep.launch.supervise import ended
from samestep.launch.terminal import copy_size, open_terminal
from samestep.rankenv import child_environment, set_variables, variable

__all__: list[str] = []

CHUNK = 1 << 16  # bytes read at a time
LAST_READS = 4  # of a rank that has ended: more than a pipe holds; whoever writes on is not the rank


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


class Tell(Protocol):
    """Passes one message on; `payload` holds bytes of output."""

    def __call__(self, kind: str, payload: bytes = b"", **body: Any) -> None: ...


@dataclass
class _Member:
    """One rank."""

    rank: int
    process: Process
    control: Pipe
    stacks: IO[bytes]
    progress: int
    outputs: dict[int, str] = field(default_factory=dict)  # descriptor: "out" or "err"
    shown: int = 0  # bytes of the stacks that were passed on
    ended: bool = False


class LocalRanks:
    """The ranks of one host.

    Args:
        loop: what waits for them.
        tell: where messages go.
    """

    def __init__(self, loop: Loop, tell: Tell) -> None:
        self._loop = loop
        self._tell = tell
        self._members: dict[int, _Member] = {}
        self._terminals: list[tuple[int, int]] = []  # (the real one, the master of rank 0's)
        self._killed = 0  # what the kernel had killed for want of memory when the ranks were started
        self._paused = False  # the ranks' output is not read

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
        obstacle = obstacle or warm(source, folder)
        self._forks = obstacle is None
        return f"{job.program} starts in fresh interpreters: {obstacle}" if obstacle else None

    def start(self, job: Job, listener: socket.socket | None) -> None:
        """Starts all ranks; the first serves the store on `listener`, if there is one."""
        self._killed = out_of_memory_kills()  # of an earlier attempt, say
        for place, rank in enumerate(job.ranks):
            self._start(job, place, rank, listener if place == 0 else None)
        if listener is not None:
            listener.close()  # rank 0's alone by now: when it ends, peers are refused rather than left waiting

    def _start(self, job: Job, place: int, rank: int, listener: socket.socket | None) -> None:
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the rank)
        memory = progress.create()
        outputs, sinks = self._open_streams(job, rank)
        option = () if job.local_rank_option is None else (f"{job.local_rank_option}={place}",)
        assignment = RankTask(
            program=(job.program, *option, *job.arguments),
            is_module=job.is_module,
            control=theirs.fileno(),
            stacks=stacks.fileno(),
            store=None if listener is None else listener.fileno(),
            progress=memory,
        )
        environment = child_environment(job.variables[place])
        channel = mpi_channel() if len(job.ranks) == 1 else []
        process = self._begin(assignment, environment, sinks, channel, reads=job.reads)
        theirs.close()
        for sink in sinks.values():
            os.close(sink)
        if job.pinned:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, pin(read_cores(), len(job.ranks), place))
        self._watch(_Member(rank, process, Pipe(ours), stacks, memory, outputs))

    def _begin(
        self,
        assignment: RankTask,
        environment: dict[str, str],
        sinks: dict[str, int],
        channel: list[int],
        *,
        reads: bool,
    ) -> Process:
        if self._forks:
            stdin = 0 if reads else None
            return fork(assignment, environment, stdin=stdin, stdout=sinks["out"], stderr=sinks["err"], keep=channel)
        process = start(
            rank_command(*assignment.options()),
            environment,
            keep=[*assignment.descriptors(), *channel],
            stdin=None if reads else subprocess.DEVNULL,
            stdout=sinks["out"],
            stderr=sinks["err"],
        )
        lower_again(process.pid)
        return process

    def _open_streams(self, job: Job, rank: int) -> tuple[dict[int, str], dict[str, int]]:
        """Returns the ends that are read here, and those that the rank writes to."""
        outputs, sinks = {}, {}
        for stream, real in (("out", 1), ("err", 2)):
            drawn = rank == 0 and stream in job.drawn
            source, sink = open_terminal(real) if drawn else os.pipe()
            if drawn:
                self._terminals.append((real, source))
            outputs[source], sinks[stream] = stream, sink
        return outputs, sinks

    def _watch(self, member: _Member) -> None:
        self._members[member.rank] = member
        handle = os.pidfd_open(member.process.pid)
        self._loop.watch(handle, lambda: self._ended(member, handle))
        self._loop.watch(member.control.fileno(), lambda: self._listen(member))
        for descriptor in member.outputs:
            os.set_blocking(descriptor, False)
        self._watch_outputs(member)

    def _watch_outputs(self, member: _Member) -> None:
        for descriptor in member.outputs:
            if self._paused:
                self._loop.forget(descriptor)
            else:
                self._loop.watch(descriptor, partial(self._pump, member, descriptor))

    def pause(self, *, pause: bool) -> None:
        """Reads the ranks' output no more, or again; they wait when their pipes are full."""
        self._paused = pause
        for member in self._members.values():
            self._watch_outputs(member)

    def _pump(self, member: _Member, descriptor: int) -> bool:
        """Passes on what a stream holds; returns whether there may be more."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the other side of a pseudo-terminal is closed
            data = b""
        if data:
            self._tell("output", data, rank=member.rank, stream=member.outputs[descriptor])
            return True
        self._close(member, descriptor)
        return False

    def _close(self, member: _Member, descriptor: int) -> None:
        self._loop.forget(descriptor)
        del member.outputs[descriptor]
        self._terminals = [(real, master) for real, master in self._terminals if master != descriptor]
        os.close(descriptor)

    def _listen(self, member: _Member) -> bool:
        """Passes on what a rank says; returns whether there may be more."""
        messages, more = member.control.take()
        for said in messages:
            self._tell(said.pop("kind"), rank=member.rank, **said)
        if member.control.ended:
            self._loop.forget(member.control.fileno())
        return more

    def _ended(self, member: _Member, handle: int) -> None:
        self._loop.forget(handle)
        os.close(handle)
        code = exit_status(member.process)
        assert code is not None
        member.ended = True
        while self._listen(member):
            pass
        for descriptor in list(member.outputs):
            for _ in range(LAST_READS):
                if not self._pump(member, descriptor):
                    break
        record = progress.read(member.progress)
        place = self._show_stacks(member) if code < 0 else (None, None)
        if code < 0 and place[0] is None and record.in_collective:
            place = record.site, text_of(record.site)
        died = death(member.rank, member.process.pid, code, place, of_memory=self._of_memory(code))
        self._tell("ended", **ended(member.rank, member.process.pid, code, asdict(died), record))

    def _of_memory(self, code: int) -> bool:
        return code == -signal.SIGKILL and out_of_memory_kills() > self._killed

    def _show_stacks(self, member: _Member) -> tuple[str | None, str | None]:
        """Passes on the python stacks that faulthandler wrote; returns the user's own line in them."""
        text = self._stacks(member)
        if text:
            self._tell("output", text, rank=member.rank, stream="err")
        return place_in(text.decode(errors="replace"))

    def _stacks(self, member: _Member) -> bytes:
        """Returns what faulthandler wrote since the last look."""
        size = os.fstat(member.stacks.fileno()).st_size
        text = os.pread(member.stacks.fileno(), size - member.shown, member.shown)
        member.shown = size
        return text

    def order(self, what: str, ranks: Iterable[int], number: int = 0) -> None:
        """Gives an order to those of `ranks` that are here and alive.

        `stop`, `preempt` and `flight` go over the control pipe, `signal` to the ranks alone, `terminate` and `kill` to
        all that they have started too; `ask` makes them write their stacks.
        """
        for member in [self._members[rank] for rank in ranks if rank in self._members]:
            process = member.process
            if what in {"stop", "preempt", "flight"}:
                member.control.order(what, number)
            elif what == "signal":
                signal_alone(process, number)
            elif what == "ask":
                signal_alone(process, STACKS_SIGNAL)
            elif what == "waiting":
                text = self._stacks(member)
                where, source = place_in(text.decode(errors="replace"))
                self._tell("waiting", text, rank=member.rank, where=where, source=source)
            else:
                signal_group(process, signal.SIGTERM if what == "terminate" else signal.SIGKILL)

    def show_standing(self, text: str) -> None:
        """Tells rank 0, which draws the progress, how the ranks stand."""
        if 0 in self._members:
            self._members[0].control.send("standing", text=text)

    def records(self) -> dict[int, tuple[int, progress.Progress]]:
        """Returns process and progress record of every rank that has not ended."""
        alive = {rank: member for rank, member in self._members.items() if not member.ended}
        return {rank: (member.process.pid, progress.read(member.progress)) for rank, member in alive.items()}

    def resize(self) -> None:
        """Gives rank 0's terminals the size of the real ones."""
        for real, master in self._terminals:
            copy_size(real, master)

    def clear(self) -> list[str]:
        """Ends whatever the ranks, all of which must have ended, have left; returns the names of what had left them."""
        for member in self._members.values():
            signal_group(member.process, signal.SIGKILL)
            member.process.wait()
        left = end_orphans()
        self._drain()
        for member in self._members.values():
            self._dismiss(member)
        self._members.clear()
        self._terminals.clear()
        return left

    def _drain(self) -> None:
        """Takes what is still in the pipes, whose writers are gone."""
        for member in self._members.values():
            for descriptor in list(member.outputs):
                for _ in range(LAST_READS):
                    if not self._pump(member, descriptor):
                        break

    def bury(self) -> None:
        """Reaps what ranks had started and left, and what has ended since: it has come to this process."""
        own = {member.process.pid for member in self._members.values()}
        for process in set(children(os.getpid())) - own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)

    def _dismiss(self, member: _Member) -> None:
        for descriptor in list(member.outputs):
            self._close(member, descriptor)
        self._loop.forget(member.control.fileno())
        member.control.close()
        member.stacks.close()
        os.close(member.progress)

    def end(self) -> None:
        """Kills everything at once, whoever still runs."""
        for member in self._members.values():
            reap(member.process)
        end_orphans()
