"""Tells of a script that starts its ranks by itself, with torch.multiprocessing."""

from __future__ import annotations

import functools
import sys
from typing import Any

from samestep.launch.imports import when_imported
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []


def watch(listener: Callbacks) -> None:
    """Changes what torch.multiprocessing.spawn calls."""
    when_imported("torch.multiprocessing.spawn", functools.partial(_watch, listener))


class _Ended:
    """Processes that have ended, as a script knows them that joins them by itself."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        """They have."""
        return True

    def pids(self) -> list[int]:
        """Nobody is left."""
        return []


def _watch(listener: Callbacks, module: Any) -> None:
    original = module.start_processes

    @functools.wraps(original)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **kwargs: Any) -> Any:
        if listener.spawning(fn, args, nprocs):
            return None if join else _Ended()
        return original(fn, args, nprocs, join, *rest, **kwargs)

    module.start_processes = start_processes
    package = sys.modules.get("torch.multiprocessing")
    if package is not None and hasattr(package, "start_processes"):
        package.start_processes = start_processes  # type: ignore[attr-defined]
