"""Warnings that point at the user's own line, however many frames of ours and of torch's lie between.

`warnings.warn` counts frames, and a line of a generator or of a hook is reached by more ways than one.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from samestep.launch.failure import is_user_file

__all__: list[str] = []


def warn(message: str) -> None:
    """Warns at the innermost line that is the user's own, or at the caller's where there is none."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (what warnings itself counts)
    level = 2
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=2 if frame is None else level)
