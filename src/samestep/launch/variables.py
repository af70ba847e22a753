"""What every rank sees in its environment: torchrun's variables, so that a script written for it runs unchanged.

    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE      this process's place, in all and on its host
    GROUP_RANK GROUP_WORLD_SIZE ROLE_*               this host's place among the hosts
    MASTER_ADDR MASTER_PORT                          where the store answers
    TORCHELASTIC_*                                   run id, restarts so far, and that the launcher keeps the store
    OMP_NUM_THREADS                                  the cores this process may use, divided by its ranks
    GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME            the way to the other hosts; lo where there are none

torchrun sets OMP_NUM_THREADS to 1 whatever the machine has; a user's own setting wins here as there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.launch.address import LOOPBACK
from samestep.launch.cores import read_cores, threads
from samestep.rankenv import variable

__all__: list[str] = []

LOOPBACK_INTERFACE = "lo"


@dataclass(frozen=True)
class Place:
    """Where one rank stands among the hosts."""

    host_index: int
    local_rank: int
    local_size: int


def lay_out(hosts: Sequence[tuple[str, int]]) -> tuple[Place, ...]:
    """Returns every rank's place, in rank order.

    Args:
        hosts: name and number of ranks of each part; parts may share a host, as tasks of Slurm do.

    Example:
        >>> [place.local_rank for place in lay_out([("a", 2), ("b", 1), ("a", 1)])]
        [0, 1, 0, 2]
    """
    names = list(dict.fromkeys(name for name, _ in hosts))
    totals: Counter[str] = Counter()
    for name, count in hosts:
        totals[name] += count
    seen: Counter[str] = Counter()
    places = []
    for name, count in hosts:
        for _ in range(count):
            places.append(Place(names.index(name), seen[name], totals[name]))
            seen[name] += 1
    return tuple(places)


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The ranks that start together. `places` is each rank's; by default all are on one host."""

    size: int
    port: int
    run_id: str
    restarts: int = 0
    most_restarts: int = 0
    host: str = LOOPBACK
    interface: str = LOOPBACK_INTERFACE
    places: tuple[Place, ...] = ()

    def place(self, rank: int) -> Place:
        """Returns where one rank stands."""
        return self.places[rank] if self.places else Place(0, rank, self.size)


def rank_variables(group: RankLayout, rank: int, *, threads: int | None = None) -> dict[str, str]:
    """Returns the variables of one rank; those that the user has set already and that are theirs are left out."""
    here = group.place(rank)
    place = {
        "RANK": rank,
        "LOCAL_RANK": here.local_rank,
        "WORLD_SIZE": group.size,
        "LOCAL_WORLD_SIZE": here.local_size,
        "GROUP_RANK": here.host_index,
        "GROUP_WORLD_SIZE": 1 + max((place.host_index for place in group.places), default=0),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": group.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": group.host,
        "MASTER_PORT": group.port,
        "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_RESTART_COUNT": group.restarts,
        "TORCHELASTIC_MAX_RESTARTS": group.most_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    theirs = {
        "OMP_NUM_THREADS": threads or threads_per_rank(here.local_size),
        "GLOO_SOCKET_IFNAME": group.interface,
    }
    if group.interface != LOOPBACK_INTERFACE:
        theirs["NCCL_SOCKET_IFNAME"] = group.interface
    unset = {name: value for name, value in theirs.items() if variable(name) is None}
    return {name: str(value) for name, value in (place | unset).items()}


def threads_per_rank(size: int) -> int:
    """Returns how many threads each of `size` ranks may use without two wanting the same core."""
    return threads(read_cores(), size)
