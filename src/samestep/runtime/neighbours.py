"""Which ranks of an axis stand on one host and see each other, and memory that those share.

A launcher tells how many ranks a host has, not whether they may look into each other: ranks in containers of their own
share a kernel and no process numbers. So each says in which namespace its number counts, on which boot of which kernel.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.collectives import board
from samestep.collectives.board import SharedCounters
from samestep.collectives.memory import shared_segment
from samestep.machine import namespace
from samestep.runtime.axes import Axis, Neighbours
from samestep.runtime.backend import spelled
from samestep.runtime.exchange import all_gather_json

__all__: list[str] = []


def gather_host_map(axis: Axis) -> Neighbours:
    """Returns who stands where. Collective: every rank of the axis must call it."""
    return by_host(all_gather_json(axis, sight()))


def sight() -> list[str | int | None]:
    """Returns what a rank tells of itself: the namespace of its process number, and that number."""
    return [namespace("pid"), os.getpid()]


def by_host(told: Sequence[Sequence[Any]]) -> Neighbours:
    """Returns who stands where, from what each rank tells of itself, in their order."""
    hosts: dict[str | int, list[int]] = {}
    for position, (sight, _) in enumerate(told):
        hosts.setdefault(sight or position, []).append(position)  # who cannot say is taken to be alone
    return Neighbours(tuple(map(tuple, hosts.values())), tuple(process for _, process in told))


def shared_memory(axis: Axis, neighbours: Neighbours, bytes_each: int) -> mmap.mmap | None:
    """Returns memory that this host's ranks share, all zero; None on every rank of the axis if one cannot see its own.

    Collective: every rank of the axis must call it.

    Args:
        axis: the ranks.
        neighbours: who stands where.
        bytes_each: for each rank of the host.
    """
    here = neighbours.beside(axis.rank)
    tell = functools.partial(all_gather_json, axis)
    return shared_segment(bytes_each * len(here), leader=here[0], leads=axis.rank == here[0], tell=tell)


def open_counters(axis: Axis) -> SharedCounters | None:
    """Returns a new board of this host's ranks, or None on all ranks of the axis. Collective, as above."""
    if axis.neighbours is None:
        return None
    here = axis.neighbours.beside(axis.rank)
    memory = shared_memory(axis, axis.neighbours, board.length(1))
    if memory is None:
        return None
    names = [axis.ranks[position] for position in here]
    processes = [axis.neighbours.processes[position] for position in here]
    return SharedCounters(memory, here.index(axis.rank), names, processes, axis.timeout_s)


def inter_host_group(axis: Axis) -> dist.ProcessGroup | None:
    """Returns the group of the ranks in this one's place on every host; None on one host.

    Collective, as above; the hosts must have equally many ranks.
    """
    if axis.neighbours is None or axis.neighbours.is_one_host:
        return None
    if axis.across is None:
        place = axis.neighbours.beside(axis.rank).index(axis.rank)
        axis.across = new_group([axis.ranks[host[place]] for host in axis.neighbours.hosts])
    return axis.across


def new_group(ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Returns a new group of the world's backend. Collective: these ranks must call it, and no others.

    Args:
        ranks: global ones.
        timeout: how long a collective may take, None for the backend's usual.
    """
    name = dist.get_backend()
    backend = spelled(name) if name == "mpi" else None  # torch refuses its plain name here, without need
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group
