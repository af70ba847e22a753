"""Which frames are the user's own: of exceptions, of stacks that faulthandler wrote, and of warnings."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

STACKS_SIGNAL = 40  # makes faulthandler write; a real-time signal that neither glibc (32, 33) nor torch or Slurm uses
PACKAGE = str(Path(__file__).resolve().parents[2])
_LAUNCH = (f"{Path(__file__).parents[1]}/", f"{PACKAGE}/launch/")
_PACKAGES = {"site-packages", "dist-packages"}
_RECIPES = f"{PACKAGE}/recipes"  # users of the public API: their lines are a user's lines
UNKNOWN: tuple[str | None, str | None] = (None, None)
SERVED = " in _run_function"  # torch.distributed.rpc calls it for another rank
Read = TypeVar("Read")

_start: list[str] = []  # the directory that this process was started in
_THREAD = re.compile(r"^(?:Current thread|Main thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')


def tried(read: Callable[[], Read], otherwise: Read) -> Read:
    """Returns what could be read. An exception is the script's, and may raise itself when it is looked at."""
    try:
        return read()
    except Exception:  # noqa: BLE001
        return otherwise


def text_in(error: BaseException) -> str:
    """Returns an exception's message, or what python says where it has none that can be read."""
    return tried(lambda: str(error), "<exception str() failed>")


# --- files ----------------------------------------------------------------------------------------


def is_user_file(filename: str) -> bool:
    """Tells whether a file is the user's own: neither python's, nor installed, nor ours."""
    if filename.startswith("<"):
        return filename.startswith("<ipython")
    path = real_path(filename)
    if lies_in(path, PACKAGE):
        return lies_in(path, _RECIPES)
    is_installed = not _PACKAGES.isdisjoint(Path(path).parts)  # also of the system, seen from a virtual environment
    return not (is_installed or any(lies_in(path, place) for place in _installed_places()))


def real_path(filename: str) -> str:
    return tried(lambda: os.path.realpath(filename), filename)  # the current directory may be gone


def lies_in(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/")


@cache
def _installed_places() -> set[str]:
    paths = sysconfig.get_paths()
    return {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def show_from_here() -> None:
    """Makes :func:`relative_path` go by the current directory, wherever the script goes from here."""
    with suppress(OSError):
        _start[:] = [os.getcwd()]  # noqa: PTH109


def relative_path(filename: str) -> str:
    """Returns a file as a person who started the run would name it: from that directory, if it is below.

    A file has one name: Python names the script of a spawned process "/home/train.py", and that of its parent as given,
    "../train.py".
    """
    return _relative_to(_start[0] if _start else tried(os.getcwd, ""), filename)


@cache
def _relative_to(here: str, filename: str) -> str:
    filename = os.path.normpath(os.path.join(here, filename)) if here else filename  # noqa: PTH118
    return filename[len(here) + 1 :] if here and filename.startswith(f"{here.rstrip('/')}/") else filename


def text_of(where: str) -> str | None:
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() or None if line.isdigit() else None


# --- exceptions -----------------------------------------------------------------------------------


def user_line(trace: TracebackType | None) -> tuple[str | None, str | None]:
    """Returns "file:line" and text of the innermost frame that is the user's own, or of the innermost at all."""
    return own_line(traceback.extract_tb(below_the_launcher(trace) or trace))


def own_line(frames: Sequence[traceback.FrameSummary]) -> tuple[str | None, str | None]:
    """Returns "file:line" and text of the last of `frames` that is the user's own, or of the last at all."""
    if not frames:
        return None, None
    own = [frame for frame in frames if is_user_file(frame.filename)]
    frame = (own or frames)[-1]
    text = linecache.getline(frame.filename, frame.lineno or 0).strip() or frame.line
    return f"{relative_path(frame.filename)}:{frame.lineno}", text


def below_the_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that python would have shown had it run the script itself, if any."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(("<frozen", *_LAUNCH)):
        trace = trace.tb_next
    return trace


def format_traceback(error: BaseException) -> str:
    """Returns the traceback as python prints it, without the frames of the launcher above the script."""
    ours = None if isinstance(error, SyntaxError) else error.__traceback__  # a fault of the launcher itself
    below = below_the_launcher(error.__traceback__) or ours
    lines = tried(lambda: traceback.format_exception(type(error), error, below), [type(error).__name__, "\n"])
    return "".join(lines)


# --- faulthandler's stacks ------------------------------------------------------------------------


def place_in(text: str, frame: str | None = None) -> tuple[str | None, str | None]:
    r"""Returns "file:line" and text of the user's own innermost line, of the current thread, else of the main one.

    With `frame`, the end of a line about a frame, it is the thread that has such a frame, where one has.

    >>> place_in('Current thread 0x0 (most recent call first):\n  File "a.py", line 3 in f\n')[0]
    'a.py:3'
    """
    threads: list[list[re.Match[str]]] = []
    current = found = None
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
            current = len(threads) - 1 if line.startswith(("Current", "Main")) else current
        elif threads and (match := _FRAME.match(line)) is not None:
            threads[-1].append(match)
            if found is None and frame is not None and line.endswith(frame):
                found = len(threads) - 1
    if not threads:
        return None, None
    chosen = current if found is None else found
    frames = [each for each in reversed(threads[-1 if chosen is None else chosen]) if each["line"].isdigit()]
    # the main thread is written last
    return own_line([traceback.FrameSummary(each["file"], int(each["line"]), each["name"]) for each in frames])


# --- warnings -------------------------------------------------------------------------------------


def warn(message: str) -> None:
    """Warns at the innermost line that is the user's own, or at the caller's where there is none.

    `warnings.warn` counts frames, and a line of a generator or of a hook is reached by more ways than one.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (what warnings itself counts)
    level = 2
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=2 if frame is None else level)
