"""Reports what a script does by samestep's own functions, where torch's do not show it."""

from __future__ import annotations

import functools
from typing import Any

from samestep.instrument.callbacks import listeners, notify
from samestep.instrument.patch import Group, user_line

samestep_calls = Group()  # reports calls of the public functions, and what they come to

CALLS = {
    "world": "samestep.runtime.world",
    "shards": "samestep.data.create",
    "replicate": "samestep.replicas.replicate",
    "pipeline": "samestep.pipelines.build",
    "checkpoint": "samestep.checkpoints.checkpoint",
}


def _call(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    for one in listeners("on_samestep_call"):
        args, kwargs = one.on_samestep_call(name, args, kwargs)
    return original(*args, **kwargs)


for _name, _home in CALLS.items():
    samestep_calls.patch(_home, _name)(functools.partial(_call, _name))


@samestep_calls.patch("samestep.evaluation", "_run")
def _run(original: Any, *args: Any, **kwargs: Any) -> Any:
    notify("evaluates")  # the ranks' parameters and buffers are equal by now
    return original(*args, **kwargs)


@samestep_calls.patch("samestep.evaluation", "evaluate")
def _evaluate(original: Any, *args: Any, **kwargs: Any) -> Any:
    metrics = original(*args, **kwargs)
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    notify("metrics", metrics=numbers, where=user_line())
    return metrics


@samestep_calls.patch("samestep.replicas.compression", "GradientCompression.__init__")
def _compress(original: Any, self: Any, model: Any, codec: Any, seed: int) -> None:
    original(self, model, codec, seed)
    notify("compresses", compression=self, model=model, seed=seed, where=user_line())


@samestep_calls.patch("samestep.pipelines.pipeline", "Pipeline.__init__")
def _make_pipeline(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
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
