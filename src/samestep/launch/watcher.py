"""Watches the ranks of one host that something else than `samestep run` has started; `samestep.world` brings it along.

    torchrun | srun | mpiexec | a shell        starts the ranks, and takes them down in its own way
          rank 2        rank 3
            │ control     │                    what they say, and orders (samestep.launch.control)
            │ stacks      │                    two descriptors each, handed over when they connect
            │ record      │
            └──────┬──────┘
                watcher                        the rules and last words of `samestep run`: who failed first, at which
                                               line, where the others stood; and nobody waits for the dead

It is not the ranks' parent, so of one that ends without a word it knows the exit code only if it looks before the
parent has. It never stops ranks unless one has failed, and ends when the last of them has. A rank that merely lost a
peer stays until the last words are said: a launcher that sees its ranks end takes down whatever still speaks, and
torchrun blames the first that it sees.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep import progress
from samestep.launch.control import Pipe
from samestep.launch.failure import death, text_of
from samestep.launch.loop import Loop
from samestep.launch.stacks import STACKS_SIGNAL, place_in
from samestep.launch.supervise import GRACE, Supervisor, ended
from samestep.launch.verdict import RunResult, summary_lines
from samestep.text import rank_list

__all__: list[str] = []

LONGEST = 64  # bytes in which a rank says its number
COMING = 30.0  # seconds for all ranks of the host to connect
SILENT = "it ended without a word: by a signal, or by os._exit"
ASKED_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}  # somebody has ended the run: nothing to explain


@dataclass
class _Rank:
    """One rank, which is not a child of this process."""

    rank: int
    process: int
    handle: int
    control: Pipe
    stacks: int
    record: int
    leaving: bool = False  # it has said that its interpreter ends in good order
    told: bool = False  # it has said why it fails, and ends by itself
    code: int | None = None  # of one that ended without a word, where it is known
    read: int = field(default=0)  # bytes of the stacks that were looked at


class Watch:
    """The ranks of this host, as the supervisor sees them.

    Args:
        loop: what waits.
        ranks: those that have connected.
    """

    def __init__(self, loop: Loop, ranks: Sequence[_Rank]) -> None:
        self.host = socket.gethostname()
        self.ranks = tuple(one.rank for one in ranks)
        self._loop = loop
        self._members = {one.rank: one for one in ranks}
        self.supervisor = Supervisor(loop, [self], loop.stop)
        for one in ranks:
            loop.watch(one.handle, partial(self._ended, one))
            loop.watch(one.control.fileno(), partial(self._listen, one))

    def _listen(self, one: _Rank) -> bool:
        """Hears what a rank says; returns whether there may be more."""
        messages, more = one.control.take()
        for said in messages:
            kind = said.pop("kind")
            if kind == "leaving":
                one.leaving = True
                continue
            self.supervisor.hear(self, kind, {"rank": one.rank, **said})
            if kind == "failed":
                self._over(one, said["failure"]["exit_code"], said["failure"])
        if one.control.ended:
            self._loop.forget(one.control.fileno())
        return more

    def _ended(self, one: _Rank) -> None:
        code = exit_code(one.process)
        self._loop.forget(one.handle)
        while self._listen(one):
            pass
        if one.told:
            return
        died = death(one.rank, one.process, code or 0, self._place(one))
        if code is None and not one.leaving:
            died = replace(died, exit_code=1, message=SILENT)
        one.code = code
        self._over(one, int(not one.leaving) if code is None else code, asdict(died))

    def _over(self, one: _Rank, code: int, death: dict[str, Any]) -> None:
        """Tells that a rank has ended, or is about to."""
        one.told = True
        self.supervisor.hear(self, "ended", ended(one.rank, one.process, code, death, progress.read(one.record)))

    def _place(self, one: _Rank) -> tuple[str | None, str | None]:
        """Shows the stacks that a rank died with; returns the user's own line in them, or in its record."""
        stacks = self._stacks(one)
        sys.stderr.write(stacks)
        where, record = place_in(stacks), progress.read(one.record)
        if where[0] is None and record.in_collective:
            return record.site, text_of(record.site)
        return where

    def _stacks(self, one: _Rank) -> str:
        """Returns what faulthandler wrote since the last look."""
        size = os.fstat(one.stacks).st_size
        text = os.pread(one.stacks, size - one.read, one.read)
        one.read = size
        return text.decode(errors="replace")

    def order(self, what: str, ranks: Sequence[int], number: int = 0) -> None:
        """Gives an order to those of `ranks` that are alive; see :meth:`samestep.launch.team.LocalRanks.order`."""
        for one in [self._members[rank] for rank in ranks]:
            if what == "stop":
                one.control.order(what, self.verdict().exit_code)  # launchers pass one of their ranks' codes on
            elif what == "waiting":
                where, source = place_in(self._stacks(one))
                self.supervisor.hear(self, "waiting", {"rank": one.rank, "where": where, "source": source})
            elif what != "ask" or not one.leaving:  # faulthandler may be gone by then, and the signal would kill it
                numbers = {"ask": STACKS_SIGNAL, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(one.handle, numbers.get(what, number))

    def verdict(self) -> RunResult:
        """Returns what became of the ranks of this host."""
        found = self.supervisor.verdict()
        blamed = found.blamed
        if blamed is None or blamed.exception != "EarlyExit" or self._members[blamed.rank].code == 0:
            return found
        message = blamed.message.replace("ended with exit code 0", "ended, with a code that only its parent knows,")
        return replace(found, blamed=replace(blamed, message=message))

    def dismiss(self) -> None:
        """Lets the ranks leave, and ends those that do not."""
        for one in self._members.values():
            one.control.close()
        until = time.monotonic() + GRACE
        for one in self._members.values():
            if not select.select([one.handle], [], [], max(0.0, until - time.monotonic()))[0]:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(one.handle, signal.SIGKILL)


def exit_code(process: int) -> int | None:
    """Returns how a process has ended, negative for a signal; None where its parent has taken that already."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] in {"Z", "X"} else None


def gather(listener: socket.socket, count: int) -> list[_Rank]:
    """Returns the ranks of this host, as soon as all have come, or those that came in time."""
    listener.settimeout(COMING)
    ranks: list[_Rank] = []
    with contextlib.suppress(TimeoutError):
        while len(ranks) < count:
            stream, _ = listener.accept()
            one = _welcome(stream)
            if one is not None:
                ranks.append(one)
    return ranks


def _welcome(stream: socket.socket) -> _Rank | None:
    """Takes a rank's descriptors; None for somebody else's process, or one that is gone already."""
    process, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        stream.close()
        return None
    try:
        said, (stacks, record), _, _ = socket.recv_fds(stream, LONGEST, 2)
        handle = os.pidfd_open(process)
        stream.send(b"+")  # from now on it may die
    except (OSError, ValueError):
        stream.close()
        return None
    return _Rank(int(said), process, handle, Pipe(stream), stacks, record)


def last_words(verdict: RunResult, size: int, host: str) -> list[str]:
    """Returns what is to be said at the end: nothing where nobody failed, or somebody ended the run.

    Args:
        verdict: on the ranks of this host.
        size: how many ranks there are on all hosts.
        host: this one.
    """
    blamed = verdict.blamed
    if blamed is None or blamed.signal in ASKED_TO_END or blamed.exception == "KeyboardInterrupt":
        return []
    if len(verdict.alike) == verdict.size > 1 and blamed.message == SILENT:
        ended = f"{rank_list(verdict.alike)} on host {host} ended without a word, all at once"
        return [f"samestep: error: {ended}: one by a signal or by os._exit, the others by their launcher"]
    if blamed.lost_peer and not blamed.usage and verdict.size < size:
        ranks = sorted(failure.rank for failure in verdict.failures)
        theirs = "its" if len(ranks) == 1 else "their"
        return [
            f"samestep: {rank_list(ranks)} on host {host} lost {theirs} connection to a peer: its own host says why"
        ]
    return summary_lines(replace(verdict, size=size), None)


def main() -> None:
    """Watches until the last rank of this host has ended."""
    parser = argparse.ArgumentParser(prog="samestep.launch.watcher")
    parser.add_argument("--listen", type=int, required=True, help="an inherited socket on which ranks connect")
    parser.add_argument("--ranks", type=int, required=True, help="how many there are on this host")
    parser.add_argument("--size", type=int, required=True, help="how many there are in all")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the ranks decide when it ends
    with socket.socket(fileno=options.listen) as listener:
        ranks = gather(listener, options.ranks)
    if len(ranks) < options.ranks:
        return
    loop = Loop()
    watch = Watch(loop, ranks)
    loop.run()
    words = last_words(watch.verdict(), options.size, watch.host)
    with contextlib.suppress(BrokenPipeError):  # the launcher has ended and taken no notice
        sys.stderr.write("".join(f"{line}\n" for line in words))
        sys.stderr.flush()
    watch.dismiss()


if __name__ == "__main__":
    main()
