"""Joining the world: alone, with others, or in a process group that the script made itself."""

from __future__ import annotations

import gc
import json
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from samestep import rankenv
from samestep._version import __version__
from samestep.launch.watched import connect_to_watcher, is_watched, start_watcher
from samestep.machine import machine, namespace
from samestep.runtime import mailbox
from samestep.runtime.axes import Axis, Neighbours, alone
from samestep.runtime.backend import choose_backend, group_backend
from samestep.runtime.device import check_no_shared_gpu, choose_device, gpu_uuid, set_current_device
from samestep.runtime.entries import decode_message
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.mailbox import Mailbox
from samestep.runtime.neighbours import gather_host_map, shared_memory
from samestep.runtime.rendezvous import locate, open_store, sign_in
from samestep.topology import Grid

__all__: list[str] = []

Card = tuple[int, str, str | None]  # rank, machine and which GPU


@dataclass
class Membership:
    """What joining gave: numbers, device and groups."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host_index: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None
    everyone: Axis = field(default_factory=lambda: alone("everyone"))
    data: Axis = field(default_factory=lambda: alone("data"))
    pipeline: Axis = field(default_factory=lambda: alone("pipeline"))
    owns_group: bool = False

    def release(self) -> None:
        """Lets go of the groups, and destroys them where they are its own."""
        for axis in (self.everyone, self.data, self.pipeline):
            axis.release()
        gc.collect()
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def stay_alone(asked: torch.device | None, backend: str | None, pipeline: int) -> Membership:
    Grid.of(1, pipeline)
    member = Membership()
    member.device = set_current_device(choose_device(asked, 0, 1))
    if backend is not None:
        choose_backend(backend, member.device, one_host=True)  # an impossible ask is an error here too
    return member


def adopt(
    told: rankenv.RankVariables | None, asked: torch.device | None, pipeline: int, timeout_s: float
) -> Membership:
    """Takes the process group that the script made itself, and leaves its end to the script."""
    member = Membership()
    member.rank, member.size = dist.get_rank(), dist.get_world_size()
    member.backend = dist.get_backend()
    _make_axes(member, pipeline, timeout_s)
    _number(member, all_gather_json(member.everyone, _place()), told)
    on_cpu = member.backend == "samestep" or (member.backend in {"gloo", "mpi"} and not torch.cuda.is_available())
    asked = torch.device("cpu") if asked is None and on_cpu else asked
    member.device = set_current_device(choose_device(asked, member.local_rank, member.local_size))
    bring_watcher(member, told)
    return member


class Joining:
    """One rank on its way into the world."""

    def __init__(
        self,
        *,
        backend: str | None,
        device: torch.device | None,
        pipeline: int,
        told: rankenv.RankVariables | None,
    ) -> None:
        self.backend = backend
        self.device = device
        self.pipeline = pipeline
        self.told = told

    def join(
        self, init_method: str | None, rank: int | None, size: int | None, timeout_s: float, join_timeout_s: float
    ) -> Membership:
        place = locate(init_method, self.told, rank, size)
        Grid.of(place.size, self.pipeline)
        if self.backend is not None:
            choose_backend(
                self.backend, self.device or torch.device("cpu" if self.backend != "nccl" else "cuda"), one_host=True
            )
        store = open_store(place, join_timeout_s)
        signed = sign_in(store, place, self._about(), join_timeout_s)
        member = self._settle(place.rank, signed)
        _check_cards(store, member)
        dist.init_process_group(
            backend=group_backend(str(member.backend), member.device),
            store=PrefixStore("samestep/group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
        )
        member.owns_group = True
        try:
            _make_axes(member, self.pipeline, timeout_s)
            bring_watcher(member, self.told)
        except BaseException:
            member.release()
            raise
        return member

    def _about(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "samestep": __version__,
            "torch": str(torch.__version__),
            "pipeline": self.pipeline,
            "backend": self.backend,
            "device": self.device.type if self.device else "cuda" if torch.cuda.device_count() else "cpu",
        }

    def _settle(self, rank: int, signed: list[dict[str, Any]]) -> Membership:
        """Returns this rank's numbers, device and backend."""
        member = Membership()
        member.rank, member.size = rank, len(signed)
        hosts = _number(member, [[entry["host"], str(entry.get("machine"))] for entry in signed], self.told)
        member.device = set_current_device(choose_device(self.device, member.local_rank, member.local_size))
        member.backend = choose_backend(self.backend, member.device, one_host=hosts == 1)
        return member


def _place() -> list[str]:
    return [socket.gethostname(), machine()]


def _number(member: Membership, places: list[list[str]], told: rankenv.RankVariables | None) -> int:
    """Numbers within the host follow from who is where, unless the launcher said them; returns the number of hosts.

    Args:
        member: whose rank is known.
        places: of each rank, its host's name and its machine: neither is enough by itself.
        told: by the launcher, or None.
    """
    hosts = list(dict.fromkeys(map(tuple, places)))
    here = [rank for rank, place in enumerate(places) if place == places[member.rank]]
    member.local_rank = here.index(member.rank) if told is None or told.local_rank is None else told.local_rank
    member.local_size = len(here) if told is None or told.local_size is None else told.local_size
    member.host_index = hosts.index(tuple(places[member.rank]))
    return len(hosts)


def _check_cards(store: Store, member: Membership) -> None:
    """Every rank tells which card it holds, so that all of them refuse a shared one alike."""
    if member.device.type != "cuda":
        return
    mine = json.dumps([member.rank, machine(), gpu_uuid(member.device)])
    store.set(f"samestep/card/{member.rank}", mine)
    told = {rank: store.get(f"samestep/card/{rank}") for rank in range(member.size)}
    cards = [decode_message(card, Card, of=f"rank {rank}'s GPU") for rank, card in told.items()]
    check_no_shared_gpu([(number, place, card) for number, place, card in cards])


def bring_watcher(member: Membership, told: rankenv.RankVariables | None) -> None:
    """Has this host's ranks watched over, where another launcher than samestep has started them. Collective."""
    everyone = member.everyone
    wanted = told is not None and not is_watched() and rankenv.variable("SAMESTEP_LOGS") is None
    sights = all_gather_json(everyone, namespace("pid") if wanted else None)
    if not any(sights):
        return
    mine = [rank for rank, sight in enumerate(sights) if sight is not None and sight == sights[member.rank]]
    leads = mine[:1] == [member.rank]
    names = all_gather_json(everyone, start_watcher(len(mine), member.size) if leads else None)
    if mine and names[mine[0]] is not None:
        connect_to_watcher(names[mine[0]], member.rank)


def _make_axes(member: Membership, pipeline: int, timeout_s: float) -> None:
    """Groups for the whole world and for each axis; an axis as long as the world shares the world's."""
    grid = Grid.of(member.size, pipeline)
    everybody = tuple(range(member.size))
    whole = dist.group.WORLD
    control = dist.new_group(list(everybody), backend="gloo") if member.size > 1 else None
    member.everyone = Axis("everyone", member.rank, everybody, whole, control)
    data, stage = grid.coordinates(member.rank)
    if grid.pipeline == 1:
        member.data = Axis("data", member.rank, everybody, whole, control)
        member.pipeline = alone("pipeline", member.rank)
    else:
        member.data = _axis("data", data, grid.columns(), grid.data_ranks(member.rank))
        member.pipeline = _axis("pipeline", stage, grid.rows(), grid.pipeline_ranks(member.rank))
    member.data.timeout_s = timeout_s
    if member.data.size > 1:
        member.data.neighbours = gather_host_map(member.data)
        member.data.mailbox = _open_mailbox(member.data, member.data.neighbours, timeout_s)
    if member.pipeline.size > 1:
        member.pipeline.timeout_s = timeout_s
        member.pipeline.mailbox = _open_mailbox(member.pipeline, gather_host_map(member.pipeline), timeout_s)


def _axis(name: str, position: int, lines: list[tuple[int, ...]], mine: tuple[int, ...]) -> Axis:
    """Every rank makes every line's groups, in the same order, and keeps its own."""
    group = control = None
    for line in lines:
        if len(line) == 1:
            continue
        made, beside = dist.new_group(list(line)), dist.new_group(list(line), backend="gloo")
        if line == mine:
            group, control = made, beside
    return Axis(name, position, mine, group, control)


def _open_mailbox(axis: Axis, neighbours: Neighbours, timeout_s: float) -> Mailbox | None:
    """Shared memory for the axis, where its ranks are on one host and can see each other; else None on all of them."""
    memory = shared_memory(axis, neighbours, mailbox.length(1)) if neighbours.is_one_host else None
    return None if memory is None else Mailbox(memory, axis.rank, axis.ranks, neighbours.processes, timeout_s)
