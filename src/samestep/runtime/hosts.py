"""Which ranks of an axis share a host, the memory that they share there, and groups between hosts.

A launcher reports how many ranks a host has, not whether they may look into each other: ranks in containers of their
own share a kernel and no process numbers. So each reports the namespace in which its process number counts, on which
boot of which kernel.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.collectives import counters
from samestep.collectives.counters import SharedCounters
from samestep.collectives.segments import shared_segment
from samestep.machine import namespace
from samestep.runtime.axis import Axis, HostMap
from samestep.runtime.backends import for_all_devices
from samestep.runtime.exchange import all_gather_json


def gather_host_map(axis: Axis) -> HostMap:
    """Returns which ranks share a host. Collective: every rank of the axis must call it."""
    return group_by_host(all_gather_json(axis, process_identity()))


def process_identity() -> list[str | int | None]:
    """Returns the namespace of this process's number, and that number."""
    return [namespace("pid"), os.getpid()]


def group_by_host(identities: Sequence[Sequence[Any]]) -> HostMap:
    """Returns which ranks share a host, from the :func:`process_identity` of each."""
    hosts: dict[str | int, list[int]] = {}
    for position, (pid_namespace, _) in enumerate(identities):
        hosts.setdefault(pid_namespace or position, []).append(position)  # unknown: taken to be alone on its host
    return HostMap(tuple(map(tuple, hosts.values())), tuple(process for _, process in identities))


def shared_memory(axis: Axis, host_map: HostMap, bytes_each: int) -> mmap.mmap | None:
    """Returns memory that this host's ranks share, all zero; None on every rank of the axis if one cannot open it.

    Collective: every rank of the axis must call it. `bytes_each` is for each rank of the host.
    """
    here = host_map.same_host(axis.rank)
    tell = functools.partial(all_gather_json, axis)
    return shared_segment(bytes_each * len(here), leader=here[0], leads=axis.rank == here[0], exchange=tell)


def open_counters(axis: Axis) -> SharedCounters | None:
    """Returns new counters of this host's ranks, or None on all ranks of the axis. Collective, as above."""
    if axis.host_map is None:
        return None
    here = axis.host_map.same_host(axis.rank)
    memory = shared_memory(axis, axis.host_map, counters.length(1))
    if memory is None:
        return None
    names = [axis.ranks[position] for position in here]
    processes = [axis.host_map.processes[position] for position in here]
    return SharedCounters(memory, here.index(axis.rank), names, processes, axis.timeout_s)


def inter_host_group(axis: Axis) -> dist.ProcessGroup | None:
    """Returns the group of the ranks at this one's position on every host; None on one host.

    Collective, as above; the hosts must have equally many ranks.
    """
    if axis.host_map is None or axis.host_map.is_one_host:
        return None
    if axis.inter_host is None:
        position = axis.host_map.same_host(axis.rank).index(axis.rank)
        axis.inter_host = new_group([axis.ranks[host[position]] for host in axis.host_map.hosts])
    return axis.inter_host


def new_group(ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Returns a new group of the world's backend, of these global ranks.

    Collective: these ranks must call it, and no others.
    """
    name = dist.get_backend()
    backend = for_all_devices(name) if name == "mpi" else None  # torch refuses its plain name here, without need
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group
