"""The names `samestep` and `mpi` among torch.distributed's backends, there as soon as both have been imported.

Neither import causes the other: torch is not imported for the name, nor the process group before one is made.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from samestep.runtime.mpi.register import make_known

NAME = "samestep"


def register(distributed: ModuleType) -> None:
    """Registers the backends with the module torch.distributed, once.

    Example:
        >>> import torch.distributed
        >>> register(torch.distributed)
        >>> torch.distributed.Backend("samestep")
        'samestep'
    """
    if distributed.is_available() and NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
        make_known(distributed)


def _make(group: Any, options: Any) -> Any:
    from samestep.runtime.process_group.group import SamestepGroup

    return SamestepGroup(group, options)
