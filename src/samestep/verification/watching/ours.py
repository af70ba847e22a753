"""Tells of what a script does by samestep's own functions, where torch's do not show it: evaluations."""

from __future__ import annotations

import functools
import sys
from typing import Any

from samestep.launch.imports import when_imported
from samestep.launch.noting import site
from samestep.verification.watching.listener import Listener

__all__: list[str] = []


def watch(listener: Listener) -> None:
    """Changes samestep.evaluate as soon as it is imported."""
    when_imported("samestep.running.evaluation", functools.partial(_watch, listener))


def _watch(listener: Listener, module: Any) -> None:
    original = module.evaluate

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        metrics = original(*args, **kwargs)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        listener.told("metrics", metrics=numbers, where=site(sys._getframe(1)))  # noqa: SLF001
        return metrics

    module.evaluate = evaluate
