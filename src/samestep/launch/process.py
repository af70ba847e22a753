"""Processes of the operating system: sessions, signals, orphans, limits; a rank is gone when its parent is.

Each rank asks the kernel for SIGKILL at its parent's end, stopping goes to the whole process group, and what left its
group is adopted by the nearest subreaper. torchrun's workers outlive an agent that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from samestep.rankenv import variable

ANSWER_S = 1.0  # for mpiexec to hear that a process has ended MPI
MOST_FILES = 1 << 16  # of ten thousand ranks; in containers the hard limit may be a thousand million
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)

_file_limit: list[tuple[int, int]] = []  # soft and hard limit before this process raised its own
_exit_code: list[tuple[int, bool]] = []


class ForkedProcess:
    """A process made by os.fork; forget it only after :meth:`wait`.

    Where it is the child of a fork server, `look` returns the exit code that this knows, after waiting for it and
    reaping it where its argument is true.
    """

    def __init__(self, pid: int, look: Callable[[bool], int | None] | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.look = look

    def wait(self) -> int:
        if self.returncode is None and self.look is not None:
            self.returncode = self.look(True)
        elif self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        signal_alone(self, number)


Process: TypeAlias = ForkedProcess | subprocess.Popen[bytes]  # a child, however it was started


def interpreter_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs one of our modules. -P: a `json.py` beside the user's script must not shadow ours.

    The interpreter gets the options of this one, -W, -X and -O among them, as multiprocessing's get them.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return [sys.executable, *flags, "-P", "-m", module, *arguments]


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    keep: Iterable[int] = (),
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Process:
    """Starts a program in a session of its own; streams are as in :class:`subprocess.Popen`, `keep` is inherited.

    Call it from a thread that lives at least as long as the program.
    """
    return subprocess.Popen(
        command,
        env=dict(environment),
        pass_fds=tuple(keep),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


# --- what a process does about itself -----------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; called before anything else."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(128 + signal.SIGKILL)


def survive_parent() -> None:
    """Takes :func:`die_with_parent` back: there is something to be cleared away first when the parent ends."""
    _prctl(PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def open_missing_streams() -> None:
    """Gives this process those of its three streams that it was started without (`>&-`), leading nowhere.

    Else the next file that is opened would take the number, and everybody's output would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def raise_file_limit() -> None:
    """Lets this process open as many files as it may be allowed to.

    A launcher needs six descriptors for each rank on a host, and two more for each rank of a run where it is led.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        _file_limit[:] = _file_limit or [(soft, hard)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_file_limit(process: int = 0) -> None:
    """Gives a child of this process, or this one, which is a fork, the limit that there was.

    Usually that is 1024, beyond which select(2) cannot go, so scripts must not be given more.
    """
    for limits in _file_limit:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process, resource.RLIMIT_NOFILE, limits)


def set_exit_code(code: int, *, for_certain: bool = False) -> None:
    _exit_code[:] = [(code, for_certain)]


def pending_exit_code() -> int | None:
    """Returns the exit code that was noted; None where none was, as at a script's last line."""
    return _exit_code[0][0] if _exit_code else None


def skips_exit_handlers() -> bool:
    """Whether this process ends by `os._exit`, as ranks of the launcher do: exit handlers of C libraries do not run."""
    return bool(_exit_code) and _exit_code[0][1]


def is_known_to_fail() -> bool:
    """Whether this process certainly ends with another code than 0, and its launcher knows."""
    return skips_exit_handlers() and _exit_code[0][0] != 0


def mpi_channel() -> list[int]:
    """Returns the descriptor over which mpiexec hears this process (MPICH, Intel MPI, srun with pmi2), if there is one.

    A rank that is the only one of its task inherits it, and so is the process that mpiexec means. Open MPI's has a
    name that every child can find.
    """
    number = variable("PMI_FD") or ""
    try:
        with socket.socket(fileno=os.dup(int(number))) as channel:
            return [int(number)] if channel.family == socket.AF_UNIX else []
    except (ValueError, OSError):  # there is none, or it was closed and something else has its number
        return []


def end_for_mpiexec() -> None:
    """Tells MPICH's mpiexec that MPI has ended here: a process that closes its channel without a message has failed.

    The library does so in C's exit handlers, which do not run in a process that ends by `os._exit`.
    """
    for channel in mpi_channel():
        with contextlib.suppress(OSError):  # it has been said, and mpiexec has hung up
            os.write(channel, b"cmd=finalize\n")
            select.select([channel], [], [], ANSWER_S)


# --- what it does about others --------------------------------------------------------------------


def threads(pid: int) -> list[Path]:
    """Returns the directories of a process's threads in /proc; none of one that has ended."""
    with contextlib.suppress(OSError):  # it may end between two looks
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def kill_orphans() -> None:
    """Kills every child that this process has adopted, and theirs in turn; one that is another user's may go on."""
    spared: set[int] = set()
    while orphans := set(children(os.getpid())) - spared:
        for pid in orphans:
            if stat_of(pid)[0] != "Z":
                try:
                    os.kill(pid, signal.SIGKILL)  # its own children come to us, and are next
                except ProcessLookupError:
                    pass
                except PermissionError:
                    spared.add(pid)
                    continue
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def stat_fields(pid: int | str) -> list[str]:
    """Returns what the kernel says of a process from its state on (proc_pid_stat(5)); nothing of one that is gone.

    Of one of its threads, "PID/task/TID", likewise.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def stat_of(pid: int | str) -> tuple[str, float]:
    """Returns the state of a process or thread (R, S, D or Z; Z if it has ended) and its processor time in seconds."""
    fields = stat_fields(pid)
    if not fields:
        return "Z", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def signal_group(process: Process, number: int) -> bool:
    """Sends a signal to a rank and everything it started, unless it was reaped: its number may be another's by now.

    Returns whether this user may do so: a rank can become another user's.
    """
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # just forked: it has not made its group yet
            signal_alone(process, number)
        except PermissionError:
            return False
    return True


def signal_alone(process: Process, number: int) -> None:
    """Sends a signal to a rank and not to what it started: its DataLoader's workers must outlive its last save."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def exit_status(process: Process) -> int | None:
    """Returns an ended rank's exit code, negative for a signal, without reaping it; None while it runs."""
    if process.returncode is not None:
        return process.returncode
    if isinstance(process, ForkedProcess) and process.look is not None:
        return process.look(False)
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def reap(process: Process) -> int:
    """Ends what a rank has left in its group, and itself; returns its exit code, negative for a signal.

    One that has become another user's may be out of reach. It leaves by itself when its control pipe ends, and is not
    waited for.
    """
    reached = signal_group(process, signal.SIGKILL)
    return process.wait() if reached or exit_status(process) is not None else -signal.SIGKILL


def wait_all(processes: Sequence[Process], seconds: float) -> bool:
    """Waits until all have ended or the time is over; returns whether all have. Reaps none."""
    deadline = time.monotonic() + seconds
    for process in processes:
        if exit_status(process) is None:
            handle = os.pidfd_open(process.pid)
            try:
                poller = select.poll()
                poller.register(handle, select.POLLIN)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
            finally:
                os.close(handle)
    return True
