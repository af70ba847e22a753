"""Tells of a script that starts its ranks by itself, with torch.multiprocessing."""

from __future__ import annotations

import functools
import sys
from typing import Any

from samestep.launch.imports import when_imported
from samestep.verification.watching.listener import Listener

__all__: list[str] = []


def watch(listener: Listener) -> None:
    """Changes what torch.multiprocessing.spawn calls."""
    when_imported("torch.multiprocessing.spawn", functools.partial(_watch, listener))


def _watch(listener: Listener, module: Any) -> None:
    original = module.start_processes

    @functools.wraps(original)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
        if listener.spawning(fn, args, nprocs):
            return None
        return original(fn, args, nprocs, *rest, **kwargs)

    module.start_processes = start_processes
    package = sys.modules.get("torch.multiprocessing")
    if package is not None and hasattr(package, "start_processes"):
        package.start_processes = start_processes  # type: ignore[attr-defined]
