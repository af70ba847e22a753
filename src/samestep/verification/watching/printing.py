"""Tells of what a script prints: the only place where every metric, however it was computed, comes by."""

from __future__ import annotations

import builtins
import functools
import sys
from typing import Any

from samestep.launch.noting import call_site
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []

_LONGEST = 400


def watch(listener: Callbacks) -> None:
    """Changes the built-in print."""
    original = builtins.print

    @functools.wraps(original)
    def print_(*values: Any, **options: Any) -> None:
        original(*values, **options)
        if options.get("file") in {None, sys.stdout}:
            listener.printed(lambda: " ".join(map(str, values))[:_LONGEST], call_site(sys._getframe(1)))  # noqa: SLF001

    builtins.print = print_
