"""Reports ranks that step by themselves and average their parameters now and then, by whatever function.

samestep     replicate(…, average_every=k)
torch        PeriodicModelAverager(period=k), HierarchicalModelAverager; PostLocalSGDOptimizer calls one of them
accelerate   LocalSGD(local_sgd_steps=k)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.instrument.callbacks import notify
from samestep.instrument.patch import on_import, patch, user_line

__all__: list[str] = []

_TORCH = "torch.distributed.algorithms.model_averaging"


def parameter_averages() -> None:
    """Reports declared periods, and averages of all ranks."""
    on_import("samestep.replicas.local_sgd", _patch_samestep)
    on_import(f"{_TORCH}.averagers", _patch_periodic)
    on_import(f"{_TORCH}.hierarchical_model_averager", _patch_hierarchical)
    on_import(f"{_TORCH}.utils", lambda module: _average(module, "average_parameters", lambda _, group: _is_all(group)))
    on_import("accelerate.local_sgd", _patch_accelerate)


def _patch_samestep(module: Any) -> None:
    _declare(module.LocalSGDEngine, lambda one: one.every, "average_every={}")
    _average(module, "average")


def _patch_periodic(module: Any) -> None:
    _declare(module.PeriodicModelAverager, lambda one: _for_all(one, one.period), "period={}")


def _patch_hierarchical(module: Any) -> None:
    averager = module.HierarchicalModelAverager
    _declare(averager, lambda one: _for_all(one, max(one.period_process_group_dict)), "period={}")


def _patch_accelerate(module: Any) -> None:
    local = module.LocalSGD
    _declare(local, lambda one: one.local_sgd_steps if one.enabled else None, "local_sgd_steps={}")
    _average(local, "_sync_and_avg_model_params")


def _declare(kind: Any, every: Callable[[Any], int | None], how: str) -> None:
    """Reports when one is made; `every` returns how many steps there are between averages, None where there is none."""

    @patch(kind, "__init__")
    def __init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if (steps := every(self)) is not None:
            notify("local_steps", every=steps, how=how.format(steps), where=user_line())


def _average(owner: Any, name: str, of_all: Callable[..., bool] = lambda *_: True) -> None:
    """Reports when it has averaged the parameters of all ranks."""

    @patch(owner, name)
    def average(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if of_all(*args, **kwargs):
            notify("average")


def _for_all(averager: Any, steps: int) -> int | None:
    return steps if _is_all(averager.process_group) else None


def _is_all(group: Any) -> bool:
    import torch.distributed as dist

    return group is None or dist.get_world_size(group) == dist.get_world_size()
