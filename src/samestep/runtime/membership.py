"""Membership of the world: joining it, alone, with others or in a group that the script has made, and leaving it."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from samestep import rankenv
from samestep._version import __version__
from samestep.launch.monitor.attach import connect_to_watcher, is_watched, start_watcher
from samestep.machine import machine, namespace
from samestep.rankenv import RankVariables
from samestep.runtime.axis import Axis, single_rank_axis
from samestep.runtime.backends import choose_backend, group_backend
from samestep.runtime.device import check_no_shared_gpu, choose_device, gpu_uuid, set_current_device
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.hosts import gather_host_map, shared_memory
from samestep.runtime.rendezvous import connect_store, parse_init_method, register_rank
from samestep.runtime.scalar_sums import SharedScalars, shared_bytes
from samestep.runtime.store_messages import decode_message
from samestep.topology import Grid

Card = tuple[int, str, str | None]  # rank, machine and which GPU


@dataclass(eq=False, repr=False)
class Membership:
    """What joining gives a rank: numbers, device and groups."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host_index: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None
    everyone: Axis = field(default_factory=lambda: single_rank_axis("everyone"))
    data: Axis = field(default_factory=lambda: single_rank_axis("data"))
    pipeline: Axis = field(default_factory=lambda: single_rank_axis("pipeline"))
    owns_group: bool = False

    def release_groups(self) -> None:
        """Drops the groups, and destroys them where samestep made them."""
        for axis in (self.everyone, self.data, self.pipeline):
            axis.release()
        gc.collect()
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def join_alone(device: torch.device | None, backend: str | None, pipeline: int) -> Membership:
    Grid.of(1, pipeline)
    member = Membership(device=set_current_device(choose_device(device, 0, 1)))
    if backend is not None:
        choose_backend(backend, member.device)  # an impossible backend is an error here too
    return member


def use_existing_group(
    launcher_env: RankVariables | None, device: torch.device | None, pipeline: int, timeout_s: float
) -> Membership:
    """Uses the process group that the script made itself, and leaves its end to the script."""
    member = Membership(rank=dist.get_rank(), size=dist.get_world_size(), backend=dist.get_backend())
    _make_axes(member, pipeline, timeout_s)
    _number_hosts(member, all_gather_json(member.everyone, [socket.gethostname(), machine()]), launcher_env)
    on_cpu = member.backend == "samestep" or (member.backend in {"gloo", "mpi"} and not torch.cuda.is_available())
    requested = torch.device("cpu") if device is None and on_cpu else device
    member.device = set_current_device(choose_device(requested, member.local_rank, member.local_size))
    start_watchdog(member, launcher_env)
    return member


def join_ranks(
    init_method: str | None,
    rank: int | None,
    size: int | None,
    *,
    backend: str | None,
    device: torch.device | None,
    pipeline: int,
    launcher_env: RankVariables | None,
    timeout_s: float,
    join_timeout_s: float,
) -> Membership:
    """Meets the other ranks, and makes the process groups. Collective: every rank must call it."""
    point = parse_init_method(init_method, launcher_env, rank, size)
    Grid.of(point.size, pipeline)
    if backend is not None:
        choose_backend(backend, device or torch.device("cpu" if backend != "nccl" else "cuda"))
    store = connect_store(point, join_timeout_s)
    about = {
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": os.getpid(),
        "samestep": __version__,
        "torch": str(torch.__version__),
        "pipeline": pipeline,
        "backend": backend,
        "device": device.type if device else "cuda" if torch.cuda.device_count() else "cpu",
    }
    registrations = register_rank(store, point, about, join_timeout_s)
    member = Membership(rank=point.rank, size=len(registrations))
    _number_hosts(member, [[entry["host"], str(entry.get("machine"))] for entry in registrations], launcher_env)
    member.device = set_current_device(choose_device(device, member.local_rank, member.local_size))
    member.backend = choose_backend(backend, member.device)
    _check_cards(store, member)
    dist.init_process_group(
        backend=group_backend(str(member.backend), member.device),
        store=PrefixStore("samestep/group", store),
        rank=member.rank,
        world_size=member.size,
        timeout=timedelta(seconds=timeout_s),
    )
    member.owns_group = True
    try:
        _make_axes(member, pipeline, timeout_s)
        start_watchdog(member, launcher_env)
    except BaseException:
        member.release_groups()
        raise
    return member


def _number_hosts(member: Membership, hosts: Sequence[Sequence[str]], launcher_env: RankVariables | None) -> None:
    """Numbers the rank within its host: as the launcher says, else by who is where.

    `hosts` are each rank's host name and machine; neither is enough by itself.
    """
    mine = hosts[member.rank]
    here = [rank for rank, host in enumerate(hosts) if host == mine]
    env = launcher_env
    member.local_rank = here.index(member.rank) if env is None or env.local_rank is None else env.local_rank
    member.local_size = len(here) if env is None or env.local_size is None else env.local_size
    member.host_index = list(dict.fromkeys(map(tuple, hosts))).index(tuple(mine))


def _check_cards(store: Store, member: Membership) -> None:
    """Every rank publishes which card it uses, so that all of them refuse a shared one alike; gloo can share one."""
    if member.device.type != "cuda" or member.backend == "gloo":
        return
    store.set(f"samestep/card/{member.rank}", json.dumps([member.rank, machine(), gpu_uuid(member.device)]))
    texts = {rank: store.get(f"samestep/card/{rank}") for rank in range(member.size)}
    cards = [decode_message(text, Card, of=f"rank {rank}'s GPU") for rank, text in texts.items()]
    check_no_shared_gpu([(number, host, card) for number, host, card in cards])


def start_watchdog(member: Membership, launcher_env: RankVariables | None) -> None:
    """Starts samestep's watchdog for this host's ranks, where another launcher has started them. Collective."""
    wanted = launcher_env is not None and not is_watched() and rankenv.variable("SAMESTEP_LOGS") is None
    namespaces = all_gather_json(member.everyone, namespace("pid") if wanted else None)
    if not any(namespaces):
        return
    mine = namespaces[member.rank]
    here = [rank for rank, other in enumerate(namespaces) if other is not None and other == mine]
    leads = here[:1] == [member.rank]
    names = all_gather_json(member.everyone, start_watcher(len(here), member.size) if leads else None)
    if here and names[here[0]] is not None:
        connect_to_watcher(names[here[0]], member.rank)


def _make_axes(member: Membership, pipeline: int, timeout_s: float) -> None:
    """Makes groups for the whole world and for each axis; an axis as long as the world shares the world's."""
    grid = Grid.of(member.size, pipeline)
    all_ranks = tuple(range(member.size))
    control = dist.new_group(list(all_ranks), backend="gloo") if member.size > 1 else None
    member.everyone = Axis("everyone", member.rank, all_ranks, dist.group.WORLD, control)
    data, stage = grid.coordinates(member.rank)
    if grid.pipeline == 1:
        member.data = Axis("data", member.rank, all_ranks, dist.group.WORLD, control)
        member.pipeline = single_rank_axis("pipeline", member.rank)
    else:
        member.data = _axis("data", data, grid.columns(), grid.data_ranks(member.rank))
        member.pipeline = _axis("pipeline", stage, grid.rows(), grid.pipeline_ranks(member.rank))
    for axis in (member.data, member.pipeline):
        axis.timeout_s = timeout_s
        if axis.size > 1:
            host_map = gather_host_map(axis)
            axis.host_map = host_map if axis is member.data else None
            # None, on all ranks of the axis, unless all of them share a host and can open its memory
            memory = shared_memory(axis, host_map, shared_bytes(1)) if host_map.is_one_host else None
            if memory is not None:
                axis.scalars = SharedScalars(memory, axis.rank, axis.ranks, host_map.processes, axis.timeout_s)


def _axis(name: str, position: int, lines: list[tuple[int, ...]], mine: tuple[int, ...]) -> Axis:
    """Every rank makes every line's groups, in the same order, and keeps its own."""
    group = control = None
    for line in lines:
        if len(line) == 1:
            continue
        made, host_side = dist.new_group(list(line)), dist.new_group(list(line), backend="gloo")
        if line == mine:
            group, control = made, host_side
    return Axis(name, position, mine, group, control)
