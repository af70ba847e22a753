"""Forks an agent that imports torch while the command line is still being read.

That saves the time of importing the launcher's own modules. A wrong guess costs the other core some time: that agent is
discarded, and another is forked. Nothing is imported here that torch does not import too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from samestep.rankenv import variable

TAKES_VALUE = {"--restarts", "--max-restarts", "--run-dir", "--json", "--grace", "--hang-after", "--on-hang"}
PLAIN = {"--pin"}
TASK_VARIABLES = ("SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # several of us have been started

_waiting: list[tuple[int, int, socket.socket]] = []  # the agent's ranks, its process number, our end to it


def requested_ranks(arguments: list[str]) -> int:
    """Returns how many ranks `samestep run` will fork on this host, 0 where that takes more than a quick look.

    >>> requested_ranks(["-n", "4", "--restarts", "2", "train.py", "-n", "7"])
    4
    >>> requested_ranks(["-n", "4", "--hosts", "a,b", "train.py"])
    0
    """
    ranks, rest = 0, iter(arguments)
    for argument in rest:
        name, _, value = argument.partition("=")
        if argument == "-m" or not argument.startswith("-"):
            break
        if name in {"-n", "--nproc-per-node", "--nproc_per_node"}:
            value = value or next(rest, "")
            ranks = int(value) if value.isdecimal() else 0
        elif name in TAKES_VALUE:
            value = value or next(rest, "")
        elif argument not in PLAIN:
            return 0
    return ranks if ranks > 1 else 0


def begin(arguments: list[str]) -> None:
    """Forks the agent of `samestep run ARGUMENTS` if it will be one that forks ranks; else does nothing."""
    ranks = requested_ranks(arguments)
    if ranks and "torch" not in sys.modules and not any(map(variable, TASK_VARIABLES)):
        _waiting.append((ranks, *fork_agent(ranks)))


def fork_agent(ranks: int = 0) -> tuple[int, socket.socket]:
    """Forks an agent, which imports torch at once where it is for `ranks` ranks.

    Returns its process number and this end of its connection. This process must be single-threaded.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    process = os.fork()
    if process:
        theirs.close()
        return process, ours
    try:
        ours.close()
        from samestep.launch.agent import serve_parent

        serve_parent(theirs, parent, ranks)
    finally:
        os._exit(70)  # EX_SOFTWARE: only reached where the lines above failed


def claim(ranks: int) -> tuple[int, socket.socket] | None:
    """Returns the process number of the agent that waits for so many ranks, and our end of its connection."""
    if not _waiting or _waiting[0][0] != ranks:
        return None
    _, process, end = _waiting.pop()
    return process, end


def discard() -> None:
    while _waiting:
        _, process, end = _waiting.pop()
        end.close()
        os.kill(process, signal.SIGKILL)  # it holds no ranks, and hears nothing while it imports
        os.waitpid(process, 0)
