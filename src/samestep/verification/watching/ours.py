"""Tells of what a script does by samestep's own functions, where torch's do not show it."""

from __future__ import annotations

import functools
import sys
from typing import Any

from samestep.launch.imports import when_imported
from samestep.launch.noting import call_site
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []

_CALLED = {
    "world": "samestep.runtime.world",
    "shards": "samestep.data.sharing",
    "replicate": "samestep.replicas.replicate",
    "pipeline": "samestep.pipelines.planned",
    "checkpoint": "samestep.running.checkpoints.commit",
}


def watch(listener: Callbacks) -> None:
    """Changes the functions as soon as they are imported."""
    when_imported("samestep.running.evaluation", functools.partial(_watch_evaluations, listener))
    when_imported("samestep.replicas.compression", functools.partial(_watch_compression, listener))
    when_imported("samestep.pipelines.pipeline", functools.partial(_watch_pipelines, listener))
    for name, home in _CALLED.items():
        when_imported(home, functools.partial(_watch_calls, listener, name))


def _watch_evaluations(listener: Callbacks, module: Any) -> None:
    original, runs = module.evaluate, module._run  # noqa: SLF001

    @functools.wraps(runs)
    def _run(*args: Any, **kwargs: Any) -> Any:
        listener.told("evaluates")  # the ranks' parameters and buffers are equal by now
        return runs(*args, **kwargs)

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        metrics = original(*args, **kwargs)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        listener.told("metrics", metrics=numbers, where=call_site(sys._getframe(1)))  # noqa: SLF001
        return metrics

    module._run, module.evaluate = _run, evaluate  # noqa: SLF001


def _watch_compression(listener: Callbacks, module: Any) -> None:
    original = module.GradientCompression.__init__

    @functools.wraps(original)
    def __init__(self: Any, model: Any, codec: Any, seed: int) -> None:  # noqa: N807
        from samestep.pipelines.pipeline import Pipeline

        original(self, model, codec, seed)
        if isinstance(model, Pipeline):  # which tells of itself
            return
        where = call_site(sys._getframe(1))  # noqa: SLF001
        listener.told("compresses", compression=self, model=model, seed=seed, where=where)

    module.GradientCompression.__init__ = __init__


def _watch_pipelines(listener: Callbacks, module: Any) -> None:
    original = module.Pipeline.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        listener.told(
            "staged",
            stages=self.world.pipeline.size,
            held=len(self.parts),
            replicas=self.world.data.size,
            micro_batches=self.micro_batches,
            codec=None if self.compression is None else self.compression.codec.name,
            where=call_site(sys._getframe(1)),  # noqa: SLF001
        )

    module.Pipeline.__init__ = __init__


def _watch_calls(listener: Callbacks, name: str, module: Any) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = listener.called(name, args, kwargs)
        return original(*args, **kwargs)

    setattr(module, name, call)
