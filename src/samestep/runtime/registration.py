"""The names `samestep` and `mpi` among torch.distributed's backends, there as soon as both have been imported.

    import samestep, torch.distributed as dist
    dist.init_process_group("samestep")

Other backends of torch's plugins are registered by importing their package, so this one is as well. Neither import
waits for the other: torch is not imported for the name, nor the process group before somebody makes one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from samestep.runtime.mpi.naming import make_known

__all__: list[str] = []

NAME = "samestep"


def register(distributed: ModuleType) -> None:
    """Tells torch.distributed of the backends, once.

    Args:
        distributed: the module.

    Example:
        >>> import torch.distributed
        >>> register(torch.distributed)
        >>> torch.distributed.Backend("samestep")
        'samestep'
    """
    if distributed.is_available() and NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, _made, extended_api=True, devices=["cpu"])
        make_known(distributed)


def _made(told: Any, options: Any) -> Any:
    from samestep.runtime.process_group import SamestepGroup

    return SamestepGroup(told, options)
