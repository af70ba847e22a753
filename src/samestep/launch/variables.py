"""What every rank sees in its environment: torchrun's variables, so that a script written for it runs unchanged.

    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE      this process's place, in all and on its host
    GROUP_RANK GROUP_WORLD_SIZE ROLE_*               this host's place among the hosts
    MASTER_ADDR MASTER_PORT                          where the store answers
    TORCHELASTIC_*                                   run id, restarts so far, and that the launcher keeps the store
    OMP_NUM_THREADS                                  the cores this process may use, divided by its ranks
    GLOO_SOCKET_IFNAME                               lo: ranks of one host need no network (and no name for it)

torchrun sets OMP_NUM_THREADS to 1 whatever the machine has; a user's own setting wins here as there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from samestep.launch.address import LOOPBACK
from samestep.rankenv import variable

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that start together on this host."""

    size: int
    port: int
    run_id: str
    restarts: int = 0
    host: str = LOOPBACK


def rank_variables(group: Group, rank: int) -> dict[str, str]:
    """Returns the variables of one rank; those that the user has set already and that are theirs are left out."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": group.size,
        "LOCAL_WORLD_SIZE": group.size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": group.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": group.host,
        "MASTER_PORT": group.port,
        "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_RESTART_COUNT": group.restarts,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    theirs = {
        "OMP_NUM_THREADS": threads_per_rank(group.size),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": 1,
    }
    unset = {name: value for name, value in theirs.items() if variable(name) is None}
    return {name: str(value) for name, value in (place | unset).items()}


def threads_per_rank(size: int) -> int:
    """Returns how many threads each of `size` ranks may use without two wanting the same core."""
    return max(1, len(os.sched_getaffinity(0)) // size)
