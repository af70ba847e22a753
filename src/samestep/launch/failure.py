"""What a rank writes down when it fails, and who of several failed ranks is to blame.

torchrun blames the earliest timestamp, and knows an exception only where the script wears `@record`. A victim often
notices before the culprit has finished dying, so here the cause decides, and time only among equals:

    1  its own exception, exit code or signal, the earliest of them
    2  SIGABRT without a record: gloo and NCCL abort innocent ranks too
    3  an exit with code 0 while others still waited for it
    4  an exception that says no more than that a peer is gone or silent, the earliest
"""

from __future__ import annotations

import json
import linecache
import opcode
import os
import re
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from samestep.errors import RendezvousError, SamestepError, UsageError
from samestep.files import write_private
from samestep.launch.memory import KERNEL_KILLED, counts_own_kills

__all__: list[str] = []

# What gloo, NCCL and the store say when a peer is gone or silent. They name an address, never a rank.
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out|wait timeout|"
    r"peer (closed|is gone)|remote (process|peer) (exited|has)|nccl(Remote|System)Error|ncclUnhandledCudaError|"
    r"NCCL communicator was aborted|failed to (recv|pass)|unexpected end of stream",
    re.IGNORECASE,
)
# How they begin where nothing else tells whose they are: gloo's place in its source, NCCL's name, the store's words.
NATIVE = re.compile(r"^\[\S+:\d+\] |\bnccl|^wait timeout after|TCPStore|ProcessGroup", re.IGNORECASE)
MOST_TEXT = 1 << 16  # characters of a message or a traceback that travel; the rank's own log has them all

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LAUNCH = {str(Path(__file__).parent), f"{_PACKAGE}/launch"}
_RECIPES = f"{_PACKAGE}/recipes"  # users of the public API: their lines are a user's lines
UNKNOWN: tuple[str | None, str | None] = (None, None)
Read = TypeVar("Read")

_start: list[str] = []  # the folder that this process was started in


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
    host: str = socket.gethostname()
    time: float = 0.0
    where: str | None = None
    source: str | None = None
    traceback: str = ""
    signal: int | None = None
    lost_peer: bool = False
    usage: bool = False
    in_short: bool = False

    def write(self, path: Path) -> None:
        """Writes the record beside the rank's logs."""
        write_private(path, json.dumps(asdict(self), indent=2) + "\n")


def describe(error: BaseException, rank: int) -> FailureRecord:
    """Returns the record of an exception that nobody caught, whatever that exception does when it is looked at."""
    where, source = tried(lambda: _place_of(error), UNKNOWN)
    message = error.msg if isinstance(error, SyntaxError) and isinstance(error.msg, str) else text_in(error)
    return FailureRecord(
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


def tried(read: Callable[[], Read], otherwise: Read) -> Read:
    """Returns what could be read. An exception is the script's, and may raise itself when it is looked at."""
    try:
        return read()
    except Exception:  # noqa: BLE001
        return otherwise


def text_in(error: BaseException) -> str:
    """Returns an exception's message, or what python says where it has none that can be read."""
    return tried(lambda: str(error), "<exception str() failed>")


def cut(text: str, rank: int) -> str:
    """Returns a text that may travel: of a longer one its two ends, and where all of it is."""
    if len(text) <= MOST_TEXT:
        return text
    left_out = f"[… {len(text) - MOST_TEXT} characters are left out; rank{rank}.err has all …]"
    return f"{text[: MOST_TEXT // 2]}\n{left_out}\n{text[-MOST_TEXT // 2 :]}"


def exit_code(error: BaseException) -> int:
    """Returns the code with which an uncaught `error` ends a process."""
    if isinstance(error, SystemExit):
        return _status(error.code)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, SamestepError) else 1


def _status(code: object) -> int:
    """Returns what a process's parent sees of `sys.exit(code)`: one byte; python makes -1 of what C cannot hold."""
    if isinstance(code, int):
        return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF
    return int(code is not None)


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
    trace = _innermost(error.__traceback__)
    if trace is None:
        return NATIVE.search(message) is not None
    code = trace.tb_frame.f_code
    if _communicates(code.co_filename):
        return True
    raised = code.co_code[trace.tb_lasti] == opcode.opmap["RAISE_VARARGS"]  # by a line of python, not below one
    return not raised and not _is_below(code.co_filename, "utils/data") and NATIVE.search(message) is not None


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _communicates(filename: str) -> bool:
    of_torch = any(_is_below(filename, place) for place in ("distributed", "nn/parallel", "autograd"))
    return of_torch or (_lies_in(_real(filename), _PACKAGE) and not is_user_file(filename))


def _is_below(filename: str, folder: str) -> bool:
    """Tells whether a file lies in one of torch's folders."""
    places = getattr(sys.modules.get("torch"), "__path__", ())
    return any(_lies_in(filename, f"{place}/{folder}") for place in places)


def one_line(message: str) -> str:
    """Returns what a message of gloo says, without where in gloo and what to try.

    >>> one_line("[/a/pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer. This is typically caused by …")
    'Read error [127.0.0.1]:9: Connection reset by peer'
    """
    first = message.splitlines()[0] if message else "no message"
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". This is typically")[0]


def _place_of(error: BaseException) -> tuple[str | None, str | None]:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{relative_path(error.filename)}:{error.lineno}", (error.text or "").strip()
    if isinstance(error, UsageError) and below_the_launcher(error.__traceback__) is None:
        return None, None  # the launcher's own: no line is to be looked at
    return user_line(error.__traceback__)


def user_line(trace: TracebackType | None) -> tuple[str | None, str | None]:
    """Returns "file:line" and text of the innermost frame that is the user's own, or of the innermost at all."""
    return own_line(traceback.extract_tb(below_the_launcher(trace) or trace))


def own_line(frames: traceback.StackSummary) -> tuple[str | None, str | None]:
    """Returns "file:line" and text of the last of `frames` that is the user's own, or of the last at all."""
    if not frames:
        return None, None
    own = [frame for frame in frames if is_user_file(frame.filename)]
    frame = (own or list(frames))[-1]
    text = linecache.getline(frame.filename, frame.lineno or 0).strip() or frame.line
    return f"{relative_path(frame.filename)}:{frame.lineno}", text


def show_from_here() -> None:
    """Makes :func:`relative_path` go by the current directory, wherever the script goes from here."""
    with suppress(OSError):
        _start[:] = [os.getcwd()]  # noqa: PTH109


def relative_path(filename: str) -> str:
    """Returns a file as a person who started the run would name it: from that directory, if it lies below.

    A file has one name: Python names the script of a spawned process "/home/train.py", and that of its parent as given,
    "../train.py".
    """
    return _relative_to(_start[0] if _start else tried(os.getcwd, ""), filename)


@cache
def _relative_to(here: str, filename: str) -> str:
    filename = os.path.normpath(os.path.join(here, filename)) if here else filename  # noqa: PTH118
    return filename[len(here) + 1 :] if here and filename.startswith(f"{here.rstrip('/')}/") else filename


def text_of(where: str) -> str | None:
    """Returns the text of a line named "file:line", or None where it cannot be read."""
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() or None if line.isdigit() else None


def format_traceback(error: BaseException) -> str:
    """Returns the traceback as python prints it, without the frames of the launcher above the script."""
    ours = None if isinstance(error, SyntaxError) else error.__traceback__  # a fault of the launcher itself
    below = below_the_launcher(error.__traceback__) or ours
    lines = tried(lambda: traceback.format_exception(type(error), error, below), [type(error).__name__, "\n"])
    return "".join(lines)


def below_the_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that python would have shown had it run the script itself, if any."""
    below = trace
    while below is not None and _is_launcher(below.tb_frame.f_code.co_filename):
        below = below.tb_next
    return below


def _is_launcher(filename: str) -> bool:
    return filename.startswith("<frozen") or os.path.dirname(filename) in _LAUNCH  # noqa: PTH120


def is_user_file(filename: str) -> bool:
    """Tells whether a file is the user's own: neither python's, nor installed, nor ours."""
    if filename.startswith("<"):
        return filename.startswith("<ipython")
    path = _real(filename)
    if _lies_in(path, _PACKAGE):
        return _lies_in(path, _RECIPES)
    return not any(_lies_in(path, place) for place in _installed_places())


def _real(filename: str) -> str:
    return tried(lambda: os.path.realpath(filename), filename)  # the current directory may be gone


def _lies_in(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/")


@cache
def _installed_places() -> set[str]:
    paths = sysconfig.get_paths()
    return {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def death(
    rank: int,
    pid: int,
    code: int,
    place: tuple[str | None, str | None] | None = None,
    *,
    of_memory: bool = False,
) -> FailureRecord:
    """Returns the failure of a rank that ended without a word.

    Args:
        rank: its number.
        pid: its process.
        code: its exit code, negative for a signal.
        place: the user's line that it stood at and its text, where they are known.
        of_memory: the kernel has killed a process meanwhile, because memory ran out.
    """
    number = -code if code < 0 else None
    where, source = place or UNKNOWN
    return FailureRecord(
        rank=rank,
        pid=pid,
        exception="Exit" if number is None else "Signal",
        message=_last_words(code, of_memory=of_memory),
        exit_code=code if number is None else 128 - code,
        time=time.time(),
        where=where,
        source=source,
        signal=number,
    )


def _last_words(code: int, *, of_memory: bool) -> str:
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
        exception="HostLost",
        message=f"host {host} is lost: {reason}",
        exit_code=1,
        time=time.time(),
    )


def root_cause(failures: list[FailureRecord], finished: Mapping[int, int], size: int) -> FailureRecord | None:
    """Returns the failure that explains the others, or None where nobody failed.

    Args:
        failures: one for each rank that failed by itself (not those that the launcher stopped).
        finished: process by rank, of those that had ended well when the first failed, in the order of their ends.
        size: how many ranks there are.
    """
    if not failures:
        return None
    own = [failure for failure in failures if not failure.lost_peer]
    if own:
        return min(own, key=lambda failure: (_aborted(failure), failure.time))
    first = min(failures, key=lambda failure: failure.time)
    return _early_exit(*next(iter(finished.items())), first) if finished and len(finished) < size else first


def _early_exit(rank: int, pid: int, victim: FailureRecord) -> FailureRecord:
    return FailureRecord(
        rank=rank,
        pid=pid,
        host=victim.host,
        time=victim.time,
        exception="EarlyExit",
        message=f"it ended with exit code 0 while others still waited for it (rank {victim.rank} at {victim.where})",
        exit_code=1,
    )


def _aborted(failure: FailureRecord) -> bool:
    return failure.signal == signal.SIGABRT and not failure.traceback


def as_json(failure: FailureRecord, waiting: list[int]) -> dict[str, Any]:
    """Returns what `--json` says of a failure; `waiting` are the ranks that lost their connection to the culprit."""
    names = ("rank", "host", "pid", "signal", "exception", "message", "where")
    return {name: getattr(failure, name) for name in names} | {"waiting": waiting}
