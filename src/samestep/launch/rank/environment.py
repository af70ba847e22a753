"""What every rank sees in its environment: torchrun's variables, so that a script written for it runs unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.launch.cpus import read_cores, threads
from samestep.launch.rank.store import LOOPBACK
from samestep.rankenv import variable

LOOPBACK_INTERFACE = "lo"


@dataclass(frozen=True)
class RankPlace:
    host_index: int
    local_rank: int
    local_size: int
    hosts: int = 1


def rank_places(hosts: Sequence[tuple[str, int]]) -> list[RankPlace]:
    """Returns every rank's place, in rank order; parts of one name share a host, as tasks of Slurm may.

    Example:
        >>> [place.local_rank for place in rank_places([("a", 2), ("b", 1), ("a", 1)])]
        [0, 1, 0, 2]
    """
    totals: Counter[str] = Counter()
    for name, count in hosts:
        totals[name] += count
    numbers = {name: number for number, name in enumerate(totals)}
    seen: Counter[str] = Counter()
    places = []
    for name, count in hosts:
        for _ in range(count):
            places.append(RankPlace(numbers[name], seen[name], totals[name], len(totals)))
            seen[name] += 1
    return places


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The ranks that start together: how many, where they meet, and how often they were started before."""

    size: int
    port: int
    run_id: str
    restarts: int = 0
    most_restarts: int = 0
    host: str = LOOPBACK


def rank_variables(
    layout: RankLayout,
    rank: int,
    place: RankPlace | None = None,
    *,
    threads: int | None = None,
    interface: str = LOOPBACK_INTERFACE,
) -> dict[str, str]:
    """Returns the variables of one rank; those that the user has set already and that are theirs are left out."""
    place = place or RankPlace(0, rank, layout.size)  # all on one host
    ours = {
        "RANK": rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": layout.size,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.host_index,
        "GROUP_WORLD_SIZE": place.hosts,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": layout.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": layout.host,
        "MASTER_PORT": layout.port,
        "TORCHELASTIC_RUN_ID": layout.run_id,
        "TORCHELASTIC_RESTART_COUNT": layout.restarts,
        "TORCHELASTIC_MAX_RESTARTS": layout.most_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    theirs = {"OMP_NUM_THREADS": threads or threads_per_rank(place.local_size), "GLOO_SOCKET_IFNAME": interface}
    if interface != LOOPBACK_INTERFACE:
        theirs["NCCL_SOCKET_IFNAME"] = interface
    unset = {name: value for name, value in theirs.items() if variable(name) is None}
    return {name: str(value) for name, value in (ours | unset).items()}


def threads_per_rank(size: int) -> int:
    """Returns how many threads each of `size` ranks may use without two wanting the same core."""
    return threads(read_cores(), size)
