"""A pseudo-terminal for rank 0, so that its progress display works as if nobody were between.

A program asks `isatty()` before it draws; behind a pipe it would not. Standard output and standard error get one
each where the launcher's own is a terminal, so that they stay separate.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios

OUTPUT_FLAGS = 1  # index into what tcgetattr(3) returns


def open_terminal(like: int) -> tuple[int, int]:
    """Returns (master, slave) of a new pseudo-terminal as large as `like`, which passes bytes unchanged."""
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[OUTPUT_FLAGS] &= ~termios.OPOST  # the real terminal turns \n into \r\n; twice would show in the logs
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    copy_size(like, master)
    return master, slave


def copy_size(like: int, master: int) -> None:
    size = fcntl.ioctl(like, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    fcntl.ioctl(master, termios.TIOCSWINSZ, size)


def is_terminal(descriptor: int) -> bool:
    return os.isatty(descriptor)
