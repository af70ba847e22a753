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
import os
import re
import signal
import socket
import sysconfig
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from samestep.errors import RendezvousError, SamestepError, UsageError

__all__: list[str] = []

# What gloo, NCCL and the store say when a peer is gone or silent. They name an address, never a rank.
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out|wait timeout|"
    r"peer (closed|is gone)|remote (process|peer) (exited|has)|nccl(Remote|System)Error|ncclUnhandledCudaError|"
    r"NCCL communicator was aborted|failed to (recv|pass)|unexpected end of stream",
    re.IGNORECASE,
)
_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPES = _PACKAGE / "recipes"  # users of the public API: their lines are a user's lines


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why one rank failed.

    `where` is "file:line" of the user's own innermost frame and `source` the text of that line; `lost_peer` says
    that the exception tells only of a peer that is gone; `usage` that its message alone says how to mend it.
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

    def write(self, path: Path) -> None:
        """Writes the record beside the rank's logs; it is there whole or not at all."""
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)


def describe(error: BaseException, rank: int) -> Failure:
    """Returns the record of an exception that nobody caught."""
    where, source = user_line(error.__traceback__)
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        where, source = f"{error.filename}:{error.lineno}", (error.text or "").strip()
        message = error.msg
    return Failure(
        rank=rank,
        pid=os.getpid(),
        exception=type(error).__name__,
        message=message,
        exit_code=exit_code(error),
        time=time.time(),
        where=where,
        source=source,
        traceback=format_traceback(error),
        lost_peer=lost_peer(error),
        usage=isinstance(error, UsageError | RendezvousError),
    )


def exit_code(error: BaseException) -> int:
    """Returns the code with which an uncaught `error` ends a process."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, SamestepError) else 1


def lost_peer(error: BaseException) -> bool:
    """Tells whether an exception says no more than that another rank is gone, silent or has failed.

    A :class:`SamestepError` knows by itself (its attribute `secondary`); others are judged by their message.
    """
    if isinstance(error, SamestepError):
        return error.secondary
    if isinstance(error, RuntimeError):  # torch.distributed's errors are RuntimeErrors, all of them
        return LOST_PEER.search(str(error)) is not None
    return False


def brief(message: str) -> str:
    """Returns what a message of gloo says, without where in gloo and what to try.

    >>> brief("[/a/pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer. This is typically caused by …")
    'Read error [127.0.0.1]:9: Connection reset by peer'
    """
    first = message.splitlines()[0] if message else "no message"
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". This is typically")[0]


def user_line(trace: TracebackType | None) -> tuple[str | None, str | None]:
    """Returns "file:line" and text of the innermost frame that is the user's own, or of the innermost at all."""
    return own_line(traceback.extract_tb(below_the_launcher(trace) or trace))


def own_line(frames: traceback.StackSummary) -> tuple[str | None, str | None]:
    """Returns "file:line" and text of the last of `frames` that is the user's own, or of the last at all."""
    if not frames:
        return None, None
    own = [frame for frame in frames if is_users(frame.filename)]
    frame = (own or list(frames))[-1]
    text = linecache.getline(frame.filename, frame.lineno or 0).strip() or frame.line
    return f"{frame.filename}:{frame.lineno}", text


def text_of(where: str) -> str | None:
    """Returns the text of a line named "file:line", or None where it cannot be read."""
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() or None if line.isdigit() else None


def format_traceback(error: BaseException) -> str:
    """Returns the traceback as python prints it, without the frames of the launcher above the script."""
    ours = None if isinstance(error, SyntaxError) else error.__traceback__  # a fault of the launcher itself
    below = below_the_launcher(error.__traceback__) or ours
    return "".join(traceback.format_exception(type(error), error, below))


def below_the_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that python would have shown had it run the script itself, if any."""
    below = trace
    while below is not None and _is_launcher(below.tb_frame.f_code.co_filename):
        below = below.tb_next
    return below


def _is_launcher(filename: str) -> bool:
    return filename.startswith("<frozen") or Path(filename).parent == _PACKAGE / "launch"


def is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith("<ipython")
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_RECIPES)
    return not any(path.is_relative_to(place) for place in _installed_places())


def _installed_places() -> set[Path]:
    paths = sysconfig.get_paths()
    return {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def death(
    rank: int,
    pid: int,
    code: int,
    place: tuple[str | None, str | None] | None = None,
    *,
    of_memory: bool = False,
) -> Failure:
    """Returns the failure of a rank that ended without a word.

    Args:
        rank: its number.
        pid: its process.
        code: its exit code, negative for a signal.
        place: the user's line that it stood at and its text, where they are known.
        of_memory: the kernel has killed a process for want of memory meanwhile.
    """
    number = -code if code < 0 else None
    where, source = place or (None, None)
    return Failure(
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
        return f"it ended with exit code {code} and left no exception behind"
    if of_memory:
        return "the kernel killed it because memory ran out (SIGKILL): take smaller batches or fewer workers"
    message = f"it was ended by {signal.Signals(-code).name} (signal {-code})"
    return message + ("; not by the kernel for want of memory" if -code == signal.SIGKILL else "")


def lost_host(rank: int, host: str, reason: str) -> Failure:
    """Returns the failure of a host whose connection has ended, in the name of its first rank."""
    return Failure(
        rank=rank,
        pid=0,
        host=host,
        exception="HostLost",
        message=f"host {host} is lost: {reason}",
        exit_code=1,
        time=time.time(),
    )


def count(ranks: list[int]) -> str:
    """Returns how many ranks, and which.

    >>> count([0]), count([2, 0, 1])
    ('1 other rank (0)', '3 other ranks (0, 1, 2)')
    """
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{len(ranks)} other {noun} ({', '.join(map(str, sorted(ranks)))})"


def culprit(failures: list[Failure], finished: Mapping[int, int], size: int) -> Failure | None:
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
    if finished and len(finished) < size:
        return _early_exit(*next(iter(finished.items())), first)
    return first


def _early_exit(rank: int, pid: int, victim: Failure) -> Failure:
    return Failure(
        rank=rank,
        pid=pid,
        host=victim.host,
        time=victim.time,
        exception="EarlyExit",
        message=f"it ended with exit code 0 while others still waited for it (rank {victim.rank} at {victim.where})",
        exit_code=1,
    )


def _aborted(failure: Failure) -> bool:
    return failure.signal == signal.SIGABRT and not failure.traceback


def as_json(failure: Failure, waiting: list[int]) -> dict[str, Any]:
    """Returns what `--json` says of a failure; `waiting` are the ranks that merely lost the culprit."""
    names = ("rank", "host", "pid", "signal", "exception", "message", "where")
    return {name: getattr(failure, name) for name in names} | {"waiting": waiting}
