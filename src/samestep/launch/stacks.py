"""Python stacks as faulthandler writes them: what is left of a rank that native code has ended, or holds.

Fatal Python error: Segmentation fault

Current thread 0x00007f… (most recent call first):
  File "train.py", line 12 in step        <- [1] the first that is the user's own
  File "train.py", line 20 in <module>
"""

from __future__ import annotations

import linecache
import re
import traceback

from samestep.launch.failure import own_line

__all__: list[str] = []

STACKS_SIGNAL = 40  # a real-time signal that neither glibc (32, 33) nor torch, CUDA or Slurm uses

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')


def place_in(text: str) -> tuple[str | None, str | None]:
    r"""Returns "file:line" and text of the user's own innermost line, of the current thread, else of the main one.

    >>> place_in('Current thread 0x0 (most recent call first):\n  File "a.py", line 3 in f\n')[0]
    'a.py:3'
    """
    threads: list[list[str]] = []
    current = None
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
            current = len(threads) - 1 if line.startswith("Current") else current
        elif threads and _FRAME.match(line):
            threads[-1].append(line)
    if not threads:
        return None, None
    return own_line(_summary(threads[-1 if current is None else current]))  # the main thread is written last


def _summary(lines: list[str]) -> traceback.StackSummary:
    """Returns the frames, the innermost last, as a traceback would have them."""
    frames = []
    for line in reversed(lines):
        match = _FRAME.match(line)
        if match is not None and match["line"].isdigit():
            text = linecache.getline(match["file"], int(match["line"])).strip()
            frames.append(traceback.FrameSummary(match["file"], int(match["line"]), match["name"], line=text))
    return traceback.StackSummary.from_list(frames)
