"""Reports what a script does by samestep's own functions, where torch's do not show it."""

from __future__ import annotations

import functools
from typing import Any

from samestep.instrument.callbacks import listeners, notify
from samestep.instrument.patch import on_import, patch, user_line

__all__: list[str] = []

CALLS = {
    "world": "samestep.runtime.world",
    "shards": "samestep.data.create",
    "replicate": "samestep.replicas.replicate",
    "pipeline": "samestep.pipelines.planned",
    "checkpoint": "samestep.checkpoints.checkpoint",
}


def samestep_calls() -> None:
    """Reports calls of the public functions, and what they come to."""
    on_import("samestep.evaluation", _patch_evaluations)
    on_import("samestep.replicas.compression", _patch_compression)
    on_import("samestep.pipelines.pipeline", _patch_pipelines)
    for name, home in CALLS.items():
        on_import(home, functools.partial(_patch_call, name))


def _patch_call(name: str, module: Any) -> None:
    @patch(module, name)
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        for one in listeners("on_samestep_call"):
            args, kwargs = one.on_samestep_call(name, args, kwargs)
        return original(*args, **kwargs)


def _patch_evaluations(module: Any) -> None:
    @patch(module, "_run")
    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        notify("evaluates")  # the ranks' parameters and buffers are equal by now
        return original(*args, **kwargs)

    @patch(module, "evaluate")
    def evaluate(original: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = original(*args, **kwargs)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        notify("metrics", metrics=numbers, where=user_line())
        return metrics


def _patch_compression(module: Any) -> None:
    @patch(module.GradientCompression, "__init__")
    def __init__(original: Any, self: Any, model: Any, codec: Any, seed: int) -> None:  # noqa: N807
        original(self, model, codec, seed)
        notify("compresses", compression=self, model=model, seed=seed, where=user_line())


def _patch_pipelines(module: Any) -> None:
    @patch(module.Pipeline, "__init__")
    def __init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        notify(
            "staged",
            stages=self.world.pipeline.size,
            held=len(self.parts),
            replicas=self.world.data.size,
            micro_batches=self.micro_batches,
            codec=None if self.compression is None else self.compression.codec.name,
            where=user_line(),
        )
