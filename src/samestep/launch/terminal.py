"""A pseudo-terminal for rank 0, so that its progress display works as if nobody stood between.

A program asks `isatty()` before it draws; behind a pipe it would not. Standard output and standard error get one
each where the launcher's own is a terminal, so that they stay apart.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios

__all__: list[str] = []

OUTPUT_FLAGS = 1  # index into what tcgetattr(3) returns
RESET = b"\x1b[0m"
_COLOUR = re.compile(rb"\x1b\[[\d;:]*m")
_ORDERS = re.compile(
    rb"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # strings, such as titles, up to their end (ECMA-48)
    rb"|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?"  # sequences and other escapes
    rb"|[\0-\x08\x0a-\x1f\x7f]|\xc2[\x80-\x9f]"  # single characters, those of C1 in UTF-8; the tabulator stays
)


def open_terminal(like: int) -> tuple[int, int]:
    """Returns (master, slave) of a new pseudo-terminal as large as `like`, which passes bytes unchanged."""
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[OUTPUT_FLAGS] &= ~termios.OPOST  # the real terminal turns \n into \r\n; twice would show in the logs
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    copy_size(like, master)
    return master, slave


def copy_size(like: int, master: int) -> None:
    """Gives a pseudo-terminal the size of the terminal `like`."""
    size = fcntl.ioctl(like, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    fcntl.ioctl(master, termios.TIOCSWINSZ, size)


def harmless(line: bytes) -> bytes:
    r"""Returns a line without what would move a terminal's cursor, clear it, or rename it; colours stay, and end.

    >>> harmless(b"\x1b]0;title\x07\x1b[2J\x1b[31mred")
    b'\x1b[31mred\x1b[0m'
    """
    kept = _ORDERS.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else b"", line)
    coloured = kept.rfind(b"\x1b[")
    return kept + RESET if coloured >= 0 and not kept[coloured:].startswith((RESET, b"\x1b[m")) else kept


def is_terminal(descriptor: int) -> bool:
    """Tells whether an open descriptor is a terminal."""
    return os.isatty(descriptor)
