"""One process that takes itself for one of several ranks: a virtual rank, of a script that cuts its data by itself.

    the script asks          it hears
    RANK, dist.get_rank()    2
    WORLD_SIZE               4
    all_reduce(x)            x, for its process group has one member

Its gradient is its own part of the ranks' average. Where the script cannot be given all samples at once, the average of
the virtual ranks is what its ranks can be held against.
"""

from __future__ import annotations

import functools
from typing import Any

from samestep.launch.imports import when_imported
from samestep.rankenv import set_variables

__all__: list[str] = []


def pretend(rank: int, size: int) -> None:
    """From now on, in this process."""
    set_variables({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)})
    when_imported("torch.distributed", functools.partial(_change, rank, size))


def _change(rank: int, size: int, module: Any) -> None:
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **{**kwargs, "rank": 0, "world_size": 1})
        for place in (module, module.distributed_c10d):
            place.get_rank = _of_the_world(module.get_rank, rank)
            place.get_world_size = _of_the_world(module.get_world_size, size)

    module.init_process_group = init_process_group


def _of_the_world(original: Any, answer: int) -> Any:
    """Answers for all ranks together; of groups that the script makes, it has the truth."""

    @functools.wraps(original)
    def asked(group: Any = None) -> int:
        own: int = original(group)
        return answer if group is None else own

    return asked
