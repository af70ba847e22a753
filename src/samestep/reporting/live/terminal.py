"""A terminal that belongs to a view for a while, and is given back as it was on every way out.

    entered    alternate screen, no cursor, keys at once and without echo
    left       q, Ctrl-C, an exception, SIGTERM, SIGHUP        as before, and what stood on the screen stands there
    Ctrl-Z     left, stopped; entered again when it goes on

While it is entered, signals only wake up whoever waits for keys: one that came while the terminal is being given back
would leave it half restored.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any, Self

from rich.console import Console

_KEY = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O[ -~])|[\xc0-\xff][\x80-\xbf]+|.", re.DOTALL)
_SENT = {
    "up": (b"\x1b[A", b"\x1bOA"),
    "down": (b"\x1b[B", b"\x1bOB"),
    "pageup": (b"\x1b[5~",),
    "pagedown": (b"\x1b[6~",),
    "home": (b"\x1b[H", b"\x1bOH", b"\x1b[1~"),
    "end": (b"\x1b[F", b"\x1bOF", b"\x1b[4~"),
    "tab": (b"\t",),
    "escape": (b"\x1b",),
}
_NAMES = {sequence: name for name, sequences in _SENT.items() for sequence in sequences}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAKING = (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)


class Terminal:
    """A context in which a console's terminal shows one picture after another.

    `ended_by` is the signal that asked to leave, None as long as none has.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.ended_by: int | None = None
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._attributes: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stack.callback(self._forget_signals)
        for number in _WAKING:
            self._handlers[number] = signal.signal(number, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._stack.callback(self._leave)  # before entering: half of that is undone too
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _forget_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wake)

    def _enter(self) -> None:
        if self._keys is not None:
            self._attributes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSADRAIN)
        self.console.set_alt_screen(True)
        self.console.show_cursor(False)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal has gone
            self.console.show_cursor(True)
            self.console.set_alt_screen(False)
        if self._keys is not None and self._attributes is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._attributes)

    def wait(self, seconds: float) -> Iterator[str]:
        """Yields what is pressed within a time; returns with the first keys, or, with a key "", after a signal."""
        sources = [self._woken] if self._keys is None else [self._woken, self._keys]
        ready = select.select(sources, [], [], max(0.0, seconds))[0]
        if self._woken in ready:
            self._apply_signals(os.read(self._woken, 512))
            yield ""  # the terminal may have another size, or nothing on it any more
        elif self._keys in ready and self._keys is not None:
            data = self._read(self._keys)
            if not data:
                self.ended_by = signal.SIGHUP
            yield from keys_in(data)

    def _read(self, file: int) -> bytes:
        try:
            return os.read(file, 1024)
        except OSError:
            return b""  # as its end: nobody sits there any more

    def _apply_signals(self, signals: bytes) -> None:
        self.ended_by = next((number for number in signals if number in _ENDING), self.ended_by)
        if signal.SIGTSTP in signals and self.ended_by is None:
            self._leave()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._enter()


def keys_in(data: bytes) -> Iterator[str]:
    r"""Yields the keys that a terminal has sent: a letter as itself, others by name; what is unknown is left out.

    >>> list(keys_in(b"j\x1b[A\x1b[15~\x1b[6~q"))
    ['j', 'up', 'pagedown', 'q']
    """
    for found in _KEY.findall(data):
        if found in _NAMES:
            yield _NAMES[found]
        elif len(found) == 1 and found.isascii():
            yield found.decode()
