"""What happened in a run: lines of JSON that its ranks write while they train; docs/events.md describes them.

A rank hands its lines to a thread that writes them twice a second; a rank that is killed loses what was not yet
written. A full disk drops lines, and never a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.files import make_private

VERSION = 1
PHASES = ("data", "forward", "backward", "wait", "collective", "optimizer", "other", "evaluate", "save", "load")
NON_TRAINING = ("evaluate", "save", "load")  # of a step's seconds, what is no training
LINE_FOR_EACH = 10_000  # steps with a line of their own
LOST_PEERS = "lost its peers"  # so begins the error of a rank that failed only because others had gone
PERIOD = 0.5  # seconds between two writings
MOST_WAITING = 20_000  # lines in memory
MAX_LINE_BYTES = 1 << 20  # bytes of a line; a longer one is no event


def stride(step: int) -> int:
    """Returns how many steps a line stands for, `step` steps after the rank began.

    >>> stride(10_000), stride(10_001), stride(25_000), stride(79_999)
    (1, 2, 4, 8)
    """
    return 1 if step <= LINE_FOR_EACH else 1 << (step // LINE_FOR_EACH).bit_length()


Fields = dict[str, Any] | Callable[[], dict[str, Any]]
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

# --- writing --------------------------------------------------------------------------------------


class EventFile:
    """One writer's lines, on their way into a file, which is appended to; the thread that writes begins with the first.

    The launcher's `rank` is None; `attempt` is how often the run was started again. `at_once` writes in whoever hands a
    line over, for few lines in a process that must have no other thread; `look` is called before every other writing.
    """

    def __init__(
        self,
        path: Path,
        rank: int | None,
        attempt: int = 0,
        *,
        at_once: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self._whose = f'"rank":{json.dumps(rank)},"attempt":{attempt}'
        self._waiting: deque[tuple[float, str, int, Fields]] = deque()
        self._offset = time.time() - time.monotonic()  # a clock that is set must not turn time back
        self._file: int | None = None
        self._dropped, self._why = 0, ""
        self._thread: threading.Thread | None = None
        self._at_once, self._look = at_once, look
        self._closing = threading.Event()
        self._writing = threading.Lock()

    def put(self, kind: str, step: int, fields: Fields, began: float | None = None) -> None:
        """Hands a line over, with its kind's `fields` or a function that returns them when the line is written.

        `step` is how many steps were finished, `began` a time of the monotonic clock; now by default.
        """
        if self._thread is None and not self._at_once:
            self._thread = threading.Thread(target=self._write_on, name="samestep events", daemon=True)
            self._thread.start()
        if len(self._waiting) >= MOST_WAITING:
            self._dropped, self._why = self._dropped + 1, "more lines at once than fit into memory"
            return
        self._waiting.append((time.monotonic() if began is None else began, kind, step, fields))
        if self._at_once:
            self._write()

    def close(self) -> None:
        self._closing.set()
        self._write()
        with self._writing:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write_on(self) -> None:
        while not self._closing.wait(PERIOD):
            self._look()
            self._write()

    def _write(self) -> None:
        with self._writing:
            count = len(self._waiting)
            lines = [self._line(*self._waiting[number]) for number in range(count)]
            if self._dropped:
                fields = {"lines": self._dropped, "why": self._why}
                lines.append(self._line(time.monotonic(), "dropped", 0, fields))
            if not lines:
                return
            try:
                self._append("".join(lines).encode())
                self._dropped = 0
            except OSError as error:
                self._dropped, self._why = self._dropped + count, error.strerror or str(error)
            for _ in range(count):
                self._waiting.popleft()

    def _line(self, began: float, kind: str, step: int, fields: Fields) -> str:
        head = f'{{"v":{VERSION},"t":{began + self._offset:.6f},{self._whose},"kind":"{kind}","step":{step}'
        return f"{head},{_encode(fields() if callable(fields) else fields)[1:]}\n"  # every kind has a field

    def _append(self, lines: bytes) -> None:
        if self._file is None:
            make_private(self.path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
        end = os.fstat(self._file).st_size
        try:
            while lines:
                lines = lines[os.write(self._file, lines) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)  # no half of a line in the middle of a file
            raise


_files: list[EventFile] = []  # this process's own; empty where none is kept


def attach(file: EventFile) -> None:
    """Lets this process's events go into a file."""
    _files[:] = [file]


def detach() -> None:
    """Writes no more: for a process that was forked by the one whose file this is."""
    _files.clear()


def is_attached() -> bool:
    return bool(_files)


def note(kind: str, step: int, began: float | None = None, **fields: Any) -> None:
    """Writes an event down; does nothing in a process whose events are not kept."""
    for file in _files:
        file.put(kind, step, fields, began)


# --- reading --------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Reads a file that may still be written, or not be there yet, as far as it has got each time."""

    path: Path
    torn: int = 0  # lines that are no events; a last one without its end may still become one
    newer: int | None = None  # the version of lines that only a later samestep understands
    _read: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields what has been written since the last call."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._read:
                self._read, self._rest = 0, b""  # it was begun anew
            file.seek(self._read)
            while block := file.read(1 << 20):
                self._read += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                for line in lines:
                    event = self._event(line)
                    if event is not None:
                        yield event
                if len(self._rest) > MAX_LINE_BYTES:
                    self.torn, self._rest = self.torn + 1, b""

    def _event(self, line: bytes) -> dict[str, Any] | None:
        try:
            event = json.loads(line) if line else None
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(version := event.get("v"), int):
            if version > VERSION:
                self.newer = version
                return None
            if is_event(event):
                return event
        self.torn += bool(line)
        return None


def is_event(event: dict[str, Any]) -> bool:
    """Returns whether a line has what every event has, and the fields of its kind, each of its own type."""
    kind, rank = event.get("kind"), event.get("rank")
    head = isinstance(kind, str) and _is_number(event.get("t")) and isinstance(event.get("step"), int)
    head = head and (rank is None or isinstance(rank, int)) and isinstance(event.get("attempt"), int)
    return head and all(name in event and fits(event[name]) for name, fits in KINDS.get(str(kind), {}).items())


def _is_number(value: Any) -> bool:
    """Whether it can be computed with: no bool, not infinite, not an integer beyond every double."""
    return type(value) in _NUMBERS and -_MOST < value < _MOST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _table_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_value(value: Any) -> bool:
    return _is_number(value) or value in ("nan", "inf", "-inf")


def _is_action(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 5 and isinstance(value[0], str) and all(map(_is_number, value[1:]))


def _are_spans(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for span in value:  # a loop: most of what reading a run takes is spent here
        if type(span) is not list or len(span) < 3 or type(span[0]) is not str:
            return False
        if not (_is_number(span[1]) and _is_number(span[2])):
            return False
    return True


def _are_buckets(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for bucket in value:
        if type(bucket) is not list or len(bucket) != 5:
            return False
        for moment in bucket:
            if moment is not None and not _is_number(moment):
                return False
    return True


_NUMBERS = {int, float}
_MOST = 1e300
_ABOUT_RANKS: dict[str, Callable[[Any], bool]] = {"text": _is_text, "ranks": _list_of(_is_whole)}
KINDS: dict[str, dict[str, Callable[[Any], bool]]] = {  # kind -> field -> its check
    # a rank's script begins
    "begin": {"host": _is_text, "pid": _is_whole, "size": _is_whole, "python": _is_text},
    # known when its first step is over
    "machine": {
        "torch": _or_null(_is_text),
        "backend": _or_null(_is_text),
        "device": _or_null(_is_text),
        "threads": _or_null(_is_whole),
    },
    # steps up to this one, the last of them in pieces
    "step": {
        "steps": _is_whole,
        "seconds": _is_number,
        "spent": _table_of(_is_number),  # by phase, sums over `steps` steps; what did not occur is absent
        "spans": _are_spans,  # [phase, begin, length] in microseconds; a collective with name and line
        "more": _is_whole,  # spans left out of a step that has too many
        "buckets": _are_buckets,  # [number, bytes, ready, begun, done], null where torch does not say
        "work": _table_of(_is_number),  # this rank's share of the last step: samples, weight, epoch
    },
    # numbers that the script logged
    "values": {"values": _table_of(_is_value)},
    # something was saved by samestep.checkpoint
    "checkpoint": {"seconds": _is_number, "path": _is_text, "bytes": _is_whole, "reason": _or_null(_is_text)},
    # of a step: [kind, stage, micro-batch, begin, end]
    "pipeline": {"schedule": _is_text, "stages": _is_whole, "actions": _list_of(_is_action)},
    # the exception in a line, or the lost peers, or null
    "end": {"error": _or_null(_is_text)},
    # what the writer had no room for
    "dropped": {"lines": _is_whole, "why": _is_text},
    # a piece of a step has lasted for 2 s, and goes on
    "at": {"phase": _is_text, "operation": _or_null(_is_text), "site": _or_null(_is_text)},
    # of the launcher
    **dict.fromkeys(("hang", "moves", "straggler", "network", "keeps-up", "restart"), _ABOUT_RANKS),
}
