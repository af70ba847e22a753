"""Reports ranks that step by themselves and average their parameters now and then, by whatever function.

samestep     replicate(…, average_every=k)
torch        PeriodicModelAverager(period=k), HierarchicalModelAverager; PostLocalSGDOptimizer calls one of them
accelerate   LocalSGD(local_sgd_steps=k)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.instrument.callbacks import notify
from samestep.instrument.patch import Group, user_line

parameter_averages = Group()  # reports declared periods, and averages of all ranks

_TORCH = "torch.distributed.algorithms.model_averaging"


def _declares(module: str, kind: str, every: Callable[[Any], int | None], how: str) -> None:
    """Reports when one is made; `every` returns how many steps there are between averages, None where there is none."""

    @parameter_averages.patch(module, f"{kind}.__init__")
    def made(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if (steps := every(self)) is not None:
            notify("local_steps", every=steps, how=how.format(steps), where=user_line())


def _averages(module: str, name: str, of_all: Callable[..., bool] = lambda *_: True) -> None:
    @parameter_averages.patch(module, name)
    def average(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if of_all(*args, **kwargs):
            notify("average")


def _is_all(group: Any) -> bool:
    import torch.distributed as dist

    return group is None or dist.get_world_size(group) == dist.get_world_size()


def _longest(averager: Any) -> int | None:
    """The steps until all ranks average, None where they never do."""
    periods = getattr(averager, "period_process_group_dict", None) or [averager.period]
    return max(periods) if _is_all(averager.process_group) else None


_declares("samestep.replicas.local_sgd", "LocalSGDEngine", lambda one: one.every, "average_every={}")
_averages("samestep.replicas.local_sgd", "average")
_declares(f"{_TORCH}.averagers", "PeriodicModelAverager", _longest, "period={}")
_declares(f"{_TORCH}.hierarchical_model_averager", "HierarchicalModelAverager", _longest, "period={}")
_averages(f"{_TORCH}.utils", "average_parameters", lambda _, group: _is_all(group))
_declares(
    "accelerate.local_sgd",
    "LocalSGD",
    lambda one: one.local_sgd_steps if one.enabled else None,
    "local_sgd_steps={}",
)
_averages("accelerate.local_sgd", "LocalSGD._sync_and_avg_model_params")
