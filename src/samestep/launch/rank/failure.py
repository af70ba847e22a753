"""What a rank writes down when it fails, and how its exception is understood."""

from __future__ import annotations

import json
import opcode
import os
import re
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from samestep import progress
from samestep.errors import RendezvousError, SamestepError, UsageError
from samestep.files import write_private
from samestep.launch.rank.user_code import (
    PACKAGE,
    UNKNOWN,
    below_the_launcher,
    format_traceback,
    is_user_file,
    lies_in,
    own_line,
    place_in,
    real_path,
    relative_path,
    text_in,
    tried,
    user_line,
)
from samestep.launch.resources import KERNEL_KILLED, counts_own_kills
from samestep.rankenv import variable

RPC_TIMEOUT = "RPC ran for more than set timeout"
# What gloo, NCCL, the store and TensorPipe say when a peer is gone or silent. They name an address, never a rank.
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out|wait timeout|"
    r"peer (closed|is gone)|remote (process|peer) (exited|has)|nccl(Remote|System)Error|ncclUnhandledCudaError|"
    r"NCCL communicator was aborted|failed to (recv|pass)|unexpected end of stream|originated at tensorpipe/|"
    + RPC_TIMEOUT,
    re.IGNORECASE,
)
# Their beginnings, where nothing else tells their origin: gloo's place in its source, NCCL's name, the store's words.
NATIVE = re.compile(
    r"^\[\S+:\d+\] |\bnccl|^wait timeout after|TCPStore|ProcessGroup|originated at tensorpipe/|^RPCErr:", re.IGNORECASE
)
MOST_TEXT = 1 << 16  # characters of a message or a traceback that travel; the rank's own log has them all
_SPAWNED_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_CALLED = re.compile(r"On WorkerInfo\(id=(\d+), name=([^\n]+)\):\n(?!.*On WorkerInfo)", re.DOTALL)  # the innermost
_RAISED = re.compile(r"^  .*\n(\w[\w.]*)(?:: (.*))?$", re.MULTILINE)  # the last line of a traceback

Kind = Literal[
    "exception", "exit", "signal", "oom", "early_exit", "lost_host", "hang", "deadlock", "different_collectives"
]


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """Why one rank failed.

    `where` is "file:line" of the user's own innermost frame and `source` the text of that line; `lost_peer` says
    that the exception tells only of a peer that is gone; `usage` that its message alone says how to fix it;
    `in_short` that its rank has left the traceback to its log.
    """

    rank: int
    pid: int
    exception: str
    message: str
    exit_code: int
    kind: Kind = "exception"
    host: str = socket.gethostname()
    time: float = 0.0
    where: str | None = None
    source: str | None = None
    traceback: str = ""
    signal: int | None = None
    lost_peer: bool = False
    usage: bool = False
    in_short: bool = False

    @property
    def line(self) -> str:
        return code_line(str(self.where), self.source)

    def write(self, path: Path) -> None:
        write_private(path, json.dumps(asdict(self), indent=2) + "\n")

    def as_json(self, waiting: list[int]) -> dict[str, Any]:
        """Returns what `--json` says of it; `waiting` are the ranks that lost their connection to the culprit."""
        names = ("rank", "host", "pid", "signal", "exception", "kind", "message", "where")
        return {name: getattr(self, name) for name in names} | {"waiting": waiting}


def code_line(where: str, source: str | None) -> str:
    return f"{where}  {source or ''}".rstrip()


def describe(error: BaseException, rank: int) -> FailureRecord:
    """Returns the record of an uncaught exception, of the spawned rank that has caused it where one has."""
    where, source = tried(lambda: _place_of(error), UNKNOWN)
    message = error.msg if isinstance(error, SyntaxError) and isinstance(error.msg, str) else text_in(error)
    failure = FailureRecord(
        rank=rank,
        pid=os.getpid(),
        exception=type(error).__name__,
        message=cut(message, rank),
        exit_code=exit_code(error),
        time=time.time(),
        where=where,
        source=source and cut(source, rank),
        traceback=cut(format_traceback(error), rank),
        lost_peer=tried(lambda: lost_peer(error), False),
        usage=isinstance(error, UsageError | RendezvousError),
    )
    if (called := _CALLED.search(message)) is not None:
        return tried(lambda: _raised_in_call(message, called, failure), failure)
    if type(error).__name__ == "ProcessRaisedException":  # torch.multiprocessing may never have been imported
        return tried(lambda: _raised_in_spawned(error, failure), failure)
    if type(error).__name__ == "ProcessExitedException":
        return tried(lambda: _spawned_exited(error, failure), failure)
    return failure


def _place_of(error: BaseException) -> tuple[str | None, str | None]:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{relative_path(error.filename)}:{error.lineno}", (error.text or "").strip()
    if isinstance(error, UsageError) and below_the_launcher(error.__traceback__) is None:
        return None, None  # the launcher's own: no line is to be looked at
    return user_line(error.__traceback__)


def cut(text: str, rank: int) -> str:
    """Returns a text that may travel: of a longer one its two ends, and where all of it is."""
    if len(text) <= MOST_TEXT:
        return text
    left_out = f"[… {len(text) - MOST_TEXT} characters are left out; rank{rank}.err has all …]"
    return f"{text[: MOST_TEXT // 2]}\n{left_out}\n{text[-MOST_TEXT // 2 :]}"


def exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        code = error.code
        if isinstance(code, int):  # its parent sees one byte; python makes -1 of what C cannot hold
            return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF
        return int(code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, SamestepError) else 1


# --- lost peers -----------------------------------------------------------------------------------


def lost_peer(error: BaseException) -> bool:
    """Tells whether an exception says no more than that another rank is gone, silent or has failed.

    A :class:`SamestepError` knows by itself (its attribute `secondary`). Others are judged by their message and by
    whose it is: a database and a DataLoader's worker can time out too.
    """
    if isinstance(error, SamestepError):
        return error.secondary
    if not isinstance(error, RuntimeError):  # torch.distributed's errors are RuntimeErrors, all of them
        return False
    message = text_in(error)
    if LOST_PEER.search(message) is None or message.startswith("CUDA error"):
        return False
    return any(kind.__name__ == "DistError" for kind in type(error).__mro__) or _is_of_peers(error, message)


def _is_of_peers(error: BaseException, message: str) -> bool:
    """Tells whether torch's communication has raised, or native code that the script called, as `work.wait()` does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return NATIVE.search(message) is not None
    code, file = trace.tb_frame.f_code, trace.tb_frame.f_code.co_filename
    of_torch = any(_is_below(file, place) for place in ("distributed", "nn/parallel", "autograd"))
    if of_torch or (lies_in(real_path(file), PACKAGE) and not is_user_file(file)):
        return True
    raised = code.co_code[trace.tb_lasti] == opcode.opmap["RAISE_VARARGS"]  # by a line of python, not below one
    return not raised and not _is_below(file, "utils/data") and NATIVE.search(message) is not None


def _is_below(filename: str, folder: str) -> bool:
    places = getattr(sys.modules.get("torch"), "__path__", ())
    return any(lies_in(filename, f"{place}/{folder}") for place in places)


def one_line(message: str) -> str:
    """Returns what a message of gloo says, without where in gloo and what to try.

    >>> one_line("[/a/pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer. This is typically caused by …")
    'Read error [127.0.0.1]:9: Connection reset by peer'
    """
    first = message.splitlines()[0] if message else "no message"
    return re.sub(r"^(\[\S+:\d+\] |RPCErr:\d+:)", "", first).partition(". This is typically")[0]


# --- calls of torch.distributed.rpc ---------------------------------------------------------------


def _raised_in_call(message: str, called: re.Match[str], failure: FailureRecord) -> FailureRecord:
    """It is raised again by the caller, with the text of the traceback that the other rank had."""
    text = message[called.end() :]
    where, source = _place_in_traceback(text)
    raised = _RAISED.search(text)
    if where is None or raised is None:
        return failure
    caller = "" if failure.where is None else f", called at {failure.where}"
    said = f"{raised[2] or ''} (on {called[2]}, rank {called[1]}{caller})".lstrip()
    return replace(failure, exception=raised[1], message=said, where=where, source=source)


def _place_in_traceback(text: str) -> tuple[str | None, str | None]:
    frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in _SPAWNED_FRAME.findall(text)]
    return own_line(frames)


# --- ranks that the script spawned ----------------------------------------------------------------

# torch.multiprocessing knows only which of its processes raised, and the number of the signal that ended one. The
# record of each, in SAMESTEP_LOGS, has its process number and its rank (samestep.launch.rank.observers).


def _raised_in_spawned(error: BaseException, failure: FailureRecord) -> FailureRecord:
    """It holds the text of a traceback, which is below torch's own frames and above the script's."""
    text = text_in(error).rstrip()
    where, source = _place_in_traceback(text)
    name, _, message = text.rpartition("\n")[2].partition(": ")
    message = f"{cut(message, failure.rank)} ({_spawned_rank(error)[0]})"
    return replace(failure, exception=name, message=message, where=where, source=source)


def _spawned_exited(error: BaseException, failure: FailureRecord) -> FailureRecord:
    who, stacks = _spawned_rank(error)
    where, source = place_in(stacks)
    name, code = getattr(error, "signal_name", None), getattr(error, "exit_code", 1)
    if name is None:
        message = f"it exited with code {code} without a Python exception ({who})"
        return replace(failure, kind="exit", exception="Exit", message=message, exit_code=code)
    number = abs(code)  # torch has no name for most real-time signals
    return replace(
        failure,
        kind="signal",
        exception="Signal",
        message=f"it was killed by {signal_name(number)} (signal {number}; {who})",
        signal=number,
        exit_code=128 + number,
        where=where or failure.where,
        source=source or failure.source,
    )


def _spawned_rank(error: BaseException) -> tuple[str, str]:
    process, logs = getattr(error, "error_pid", 0), variable("SAMESTEP_LOGS")
    for record in [] if logs is None else Path(logs).glob("rank*.spawned/rank*.progress"):
        if progress.read_file(record).process == process:
            stacks = record.with_suffix(".stacks").read_text(encoding="utf-8", errors="replace")
            return f"in its own rank {record.stem.removeprefix('rank')}, process {process}", stacks
    return f"in process {getattr(error, 'error_index', '?')} of those it spawned", ""


# --- failures without an exception ----------------------------------------------------------------


def death(
    rank: int,
    pid: int,
    code: int,
    place: tuple[str | None, str | None] | None = None,
    *,
    of_memory: bool = False,
) -> FailureRecord:
    """Returns the failure of a rank that ended without an exception; `code` is negative for a signal.

    `place` is the user's line that it was at and its text, where they are known; `of_memory`: the kernel has killed a
    process meanwhile, because memory ran out.
    """
    where, source = place or UNKNOWN
    kind: Kind = "oom" if of_memory else "exit" if code >= 0 else "signal"
    return FailureRecord(
        rank=rank,
        pid=pid,
        kind=kind,
        exception="Exit" if code >= 0 else "Signal",
        message=_cause_of_death(code, of_memory=of_memory),
        exit_code=code if code >= 0 else 128 - code,
        time=time.time(),
        where=where,
        source=source,
        signal=-code if code < 0 else None,
    )


def _cause_of_death(code: int, *, of_memory: bool) -> str:
    if code >= 0:
        return f"it exited with code {code} without a Python exception"
    if of_memory:
        if counts_own_kills():
            return f"{KERNEL_KILLED} it: out of memory (SIGKILL); use smaller batches or fewer DataLoader workers"
        return f"it was killed by SIGKILL; meanwhile {KERNEL_KILLED} a process of this machine: out of memory"
    message = f"it was killed by {signal_name(-code)} (signal {-code})"
    return message + ("; not by the kernel's OOM killer" if -code == signal.SIGKILL else "")


def signal_name(number: int) -> str:
    """Returns a signal's name; python knows only the ends of the real-time signals.

    >>> signal_name(15), signal_name(36)
    ('SIGTERM', 'SIGRTMIN+2')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"


def lost_host(rank: int, host: str, reason: str) -> FailureRecord:
    """Returns the failure of a host whose connection has ended, in the name of its first rank."""
    return FailureRecord(
        rank=rank,
        pid=0,
        host=host,
        kind="lost_host",
        exception="HostLost",
        message=f"host {host} is lost: {reason}",
        exit_code=1,
        time=time.time(),
    )
