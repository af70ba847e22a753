"""Watches the ranks of one host that torchrun, srun, mpiexec or a shell has started; `samestep.world` starts it.

It reports as `samestep run` does, stops ranks only after one has failed, and ends with the last of them. It is not
their parent: it knows an exit code only if it looks before the parent has.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from samestep.launch.event_loop import Loop
from samestep.launch.link import Link
from samestep.launch.process import stat_fields
from samestep.launch.rank.control import RankProcess
from samestep.launch.rank.failure import death
from samestep.launch.rank.user_code import STACKS_SIGNAL
from samestep.launch.result import RunResult, summary_lines
from samestep.launch.supervisor import KILL_AFTER_S, Supervisor
from samestep.text import rank_list

LONGEST = 64  # bytes in which a rank says its number
CONNECT_S = 30.0  # for all ranks of the host to connect
SILENT = "it ended without a word: by a signal, or by os._exit"
EXTERNAL_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}  # the run was ended from outside: nothing to explain


class ForeignRank(RankProcess):
    def __init__(self, rank: int, pid: int, handle: int, pipe: Link, stacks: int, record: int) -> None:
        super().__init__(rank, pid, pipe, stacks, record)
        self.handle = handle  # a pidfd
        self.leaving = False  # it has said that its interpreter ends in good order
        self.reported = False  # it has said why it fails, and ends by itself
        self.code: int | None = None  # of one that ended without a message, where it is known

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)


class WatchedRanks:
    def __init__(self, loop: Loop, ranks: Sequence[ForeignRank]) -> None:
        self.host = socket.gethostname()
        self.ranks = tuple(one.rank for one in ranks)
        self._loop = loop
        self._ranks = {one.rank: one for one in ranks}
        self.supervisor = Supervisor(loop, [self], loop.stop)
        for one in ranks:
            loop.watch(one.handle, partial(self._on_exit, one))
            loop.watch(one.pipe.fileno(), partial(self._receive, one))

    def _receive(self, one: ForeignRank) -> None:
        one.receive(partial(self._on_message, one))
        if one.pipe.closed:
            self._loop.forget(one.pipe.fileno())

    def _on_message(self, one: ForeignRank, kind: str, body: dict[str, Any]) -> None:
        if kind == "leaving":
            one.leaving = True
            return
        self.supervisor.on_message(self, kind, {"rank": one.rank, **body})
        if kind == "failed":
            self._report_end(one, body["failure"]["exit_code"], body["failure"])

    def _on_exit(self, one: ForeignRank) -> None:
        code = exit_code(one.pid)
        self._loop.forget(one.handle)
        self._receive(one)
        if one.reported:
            return
        place = one.place_of_death(lambda stacks: sys.stderr.write(stacks.decode(errors="replace")))
        died = death(one.rank, one.pid, code or 0, place)
        if code is None and not one.leaving:
            died = replace(died, exit_code=1, message=SILENT)
        one.code = code
        self._report_end(one, int(not one.leaving) if code is None else code, asdict(died))

    def _report_end(self, one: ForeignRank, code: int, failure: dict[str, Any]) -> None:
        one.reported = True
        self.supervisor.on_message(self, "ended", one.end_message(code, failure))

    def command(self, what: str, ranks: Sequence[int], number: int = 0) -> None:
        """Gives a command to those of `ranks` that are alive; see `LocalRanks.command`."""
        for one in [self._ranks[rank] for rank in ranks]:
            if what == "stop":
                # launchers pass one of their ranks' codes on
                one.pipe.send({"kind": what, "number": self.result().exit_code})
            elif what == "write_stacks":
                one.pipe.send({"kind": what})
            elif what == "position":
                self.supervisor.on_message(self, "position", one.position()[1])
            elif what != "dump_stacks" or not (one.leaving or one.has_new_stacks()):  # leaving, it may have no handler
                numbers = {"dump_stacks": STACKS_SIGNAL, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}
                one.signal(numbers.get(what, number))

    def result(self) -> RunResult:
        found = self.supervisor.result()
        cause = found.root_cause
        if cause is None or cause.kind != "early_exit" or self._ranks[cause.rank].code == 0:
            return found
        message = cause.message.replace("ended with exit code 0", "ended, with a code that only its parent knows,")
        return replace(found, root_cause=replace(cause, message=message))

    def dismiss(self) -> None:
        for one in self._ranks.values():
            one.pipe.close()
        until = time.monotonic() + KILL_AFTER_S
        for one in self._ranks.values():
            if not select.select([one.handle], [], [], max(0.0, until - time.monotonic()))[0]:
                one.signal(signal.SIGKILL)


def exit_code(process: int) -> int | None:
    """Returns how a process has ended, negative for a signal; None where its parent has taken that already."""
    fields = stat_fields(process)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] in {"Z", "X"} else None


def accept_ranks(listener: socket.socket, count: int) -> list[ForeignRank]:
    """Returns the ranks of this host, as soon as all have come, or those that came in time."""
    listener.settimeout(CONNECT_S)
    ranks: list[ForeignRank] = []
    with contextlib.suppress(TimeoutError):
        while len(ranks) < count:
            stream, _ = listener.accept()
            one = _accept_rank(stream)
            if one is not None:
                ranks.append(one)
    return ranks


def _accept_rank(stream: socket.socket) -> ForeignRank | None:
    process, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        stream.close()
        return None
    try:
        rank, (stacks, record), _, _ = socket.recv_fds(stream, LONGEST, 2)
        handle = os.pidfd_open(process)
        stream.send(b"+")  # from now on it may die
    except (OSError, ValueError):
        stream.close()
        return None
    return ForeignRank(int(rank), process, handle, Link(stream), stacks, record)


def last_lines(result: RunResult, size: int, host: str) -> list[str]:
    """Returns the last lines, of `size` ranks in all: none where no rank failed, or the run was ended from outside."""
    cause = result.root_cause
    if cause is None or cause.signal in EXTERNAL_SIGNALS or cause.exception == "KeyboardInterrupt":
        return []
    if len(result.same_failure) == result.size > 1 and cause.message == SILENT:
        ended = f"{rank_list(result.same_failure)} on host {host} ended without a word, all at once"
        return [f"samestep: error: {ended}: one by a signal or by os._exit, the others by their launcher"]
    if cause.lost_peer and not cause.usage and result.size < size:
        ranks = sorted(failure.rank for failure in result.failures)
        theirs = "its" if len(ranks) == 1 else "their"
        lost = f"lost {theirs} connection to a peer: its own host says why"
        return [f"samestep: {rank_list(ranks)} on host {host} {lost}"]
    return summary_lines(replace(result, size=size), None)


def main() -> None:
    """Watches until the last rank of this host has ended; arguments: the listening socket, ranks here, ranks in all."""
    descriptor, here, size = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the ranks decide when it ends
    with socket.socket(fileno=descriptor) as listener:
        ranks = accept_ranks(listener, here)
    if len(ranks) < here:
        return
    loop = Loop()
    watched = WatchedRanks(loop, ranks)
    loop.run()
    lines = last_lines(watched.result(), size, watched.host)
    with contextlib.suppress(BrokenPipeError):  # the launcher has ended and taken no notice
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    watched.dismiss()


if __name__ == "__main__":
    main()
