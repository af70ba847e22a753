"""Tells of ranks that step by themselves and average their parameters now and then, by whose function ever.

samestep     replicate(…, average_every=k)
torch        PeriodicModelAverager(period=k), HierarchicalModelAverager; PostLocalSGDOptimizer calls one of them
accelerate   LocalSGD(local_sgd_steps=k)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from samestep.launch.imports import when_imported
from samestep.launch.noting import call_site
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []

_TORCH = "torch.distributed.algorithms.model_averaging"


def watch(listener: Callbacks) -> None:
    """Changes the classes and functions as soon as they are imported."""
    when_imported("samestep.replicas.local_steps", functools.partial(_watch_ours, listener))
    when_imported(f"{_TORCH}.averagers", functools.partial(_watch_periodic, listener))
    when_imported(f"{_TORCH}.hierarchical_model_averager", functools.partial(_watch_hierarchical, listener))
    when_imported(f"{_TORCH}.utils", functools.partial(_watch_averages, listener))
    when_imported("accelerate.local_sgd", functools.partial(_watch_accelerate, listener))


def _watch_ours(listener: Callbacks, module: Any) -> None:
    _declaring(listener, module.LocalSteps, lambda one: one.every, "average_every={}")
    module.average = _averaging(listener, module.average)


def _watch_periodic(listener: Callbacks, module: Any) -> None:
    _declaring(listener, module.PeriodicModelAverager, lambda one: _for_all(one, one.period), "period={}")


def _watch_hierarchical(listener: Callbacks, module: Any) -> None:
    averager = module.HierarchicalModelAverager
    _declaring(listener, averager, lambda one: _for_all(one, max(one.period_process_group_dict)), "period={}")


def _watch_averages(listener: Callbacks, module: Any) -> None:
    module.average_parameters = _averaging(listener, module.average_parameters, lambda _, group: _is_world(group))


def _watch_accelerate(listener: Callbacks, module: Any) -> None:
    local = module.LocalSGD
    _declaring(listener, local, lambda one: one.local_sgd_steps if one.enabled else None, "local_sgd_steps={}")
    local._sync_and_avg_model_params = _averaging(listener, local._sync_and_avg_model_params)  # noqa: SLF001


def _declaring(listener: Callbacks, kind: Any, every: Callable[[Any], int | None], how: str) -> None:
    """Tells when one is made; `every` returns how many steps there are between two averages, None where it is none."""
    made = kind.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        made(self, *args, **kwargs)
        if (steps := every(self)) is not None:
            where = call_site(sys._getframe(1))  # noqa: SLF001
            listener.told("local_steps", every=steps, how=how.format(steps), where=where)

    kind.__init__ = __init__


def _averaging(listener: Callbacks, averages: Any, of_all: Callable[..., bool] = lambda *_: True) -> Any:
    """Tells when it has averaged the parameters of all ranks."""

    @functools.wraps(averages)
    def average(*args: Any, **kwargs: Any) -> None:
        averages(*args, **kwargs)
        if of_all(*args, **kwargs):
            listener.told("average")

    return average


def _for_all(averager: Any, steps: int) -> int | None:
    return steps if _is_world(averager.process_group) else None


def _is_world(group: Any) -> bool:
    import torch.distributed as dist

    return group is None or dist.get_world_size(group) == dist.get_world_size()
