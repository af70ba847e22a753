"""Measures the links between the ranks that one has: latency, bandwidth and adding; writes a cluster file of them.

    samestep bench links -n 2 --write cluster.toml                                 this machine
    samestep run --hosts node1,node2 -n 2 -m samestep bench links --write cluster.toml      these hosts

Messages are those of samestep's own engine, over gloo, Python included (:mod:`samestep.collectives.measure`); what
PyTorch's GPUs exchange through NCCL is not measured here. On one host the all-reduce in shared memory is measured too,
which samestep takes there: its bandwidth is all ranks' bytes together, so that more ranks take longer in proportion.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.bench.harness import Options, Report
from samestep.collectives.measure import measure
from samestep.errors import UsageError
from samestep.launch.cpus import read_cores
from samestep.launch.functions.spawn import spawn
from samestep.launch.rank.environment import threads_per_rank
from samestep.launch.resources import visible_gpus
from samestep.network.cluster import Cluster, parse
from samestep.network.links import Link, Links, fit
from samestep.rankenv import read_rank_variables
from samestep.runtime.exchange import all_gather_json
from samestep.text import bytes_text, seconds_text

MESSAGES = (8, 4096, 65536, 1 << 20, 4 << 20)  # bytes: larger than what a network lets pass at once
SIZES = (4096, 65536, 1 << 20, 8 << 20)  # bytes of all-reduces
CALLS = 6  # in a series


@dataclass(frozen=True)
class MeasuredLinks:
    links: Links
    shared: Link | None  # all-reduces in shared memory; bytes of all ranks a second. None over several hosts
    hosts: int  # how many there are
    local: int  # ranks on each
    memory: float  # bytes of a device; of a host's memory, a rank's even share


def devices() -> int:
    """Returns how many ranks this machine has room for: one for each GPU; without, one for each core."""
    return visible_gpus() or read_cores().count


def threads() -> int:
    """Returns how many threads each rank has where all devices are used."""
    return threads_per_rank(devices())


def local_cluster() -> Cluster:
    """Returns this machine; with several devices its links are measured, which takes some seconds."""
    count = devices()
    if count < 2:
        return parse("[nodes]\ncount = 1", "this machine")
    return parse(cluster_text(spawn(measure_cluster, count, 3, progress=False)[0]), "this machine")


def run(options: Options) -> Report:
    """Measures among the ranks that have been started, or else starts some here."""
    started = read_rank_variables()
    if max(options.ranks, 0 if started is None else started.size) < 2:
        raise UsageError("links need 2 ranks or more: samestep bench links -n 2")
    if started is not None and started.size > 1:
        found = measure_cluster(options.repeats)
    else:
        found = spawn(measure_cluster, options.ranks, options.repeats, progress=False)[0]
    text = str(found.links)
    if found.shared is not None:
        latency, bandwidth = seconds_text(found.shared.latency_s), bytes_text(found.shared.bytes_per_s)
        text += f"\nall-reduce in shared memory {latency}, and {bandwidth}/s of all ranks' bytes together"
    setting = {"hosts": found.hosts, "ranks on each": found.local}
    return Report("links", (), setting, conclusion=text, file=cluster_text(found))


def measure_cluster(series: int) -> MeasuredLinks:
    """Runs on every rank; returns what lies between all, the fastest of so many series. Collective."""
    with samestep.world(backend="samestep", device="cpu") as world:
        local = ranks_per_host(all_gather_json(world.everyone, world.local_size))
        group: Any = dist.new_group(backend="gloo")
        several = local < world.size
        links = measure(group, local if several else None, sizes=MESSAGES, crowds=several, series=series)
        shared = None if several else _shared(world.size, series)
        memories = all_gather_json(world.everyone, _memory(local))
        return MeasuredLinks(links, shared, world.size // local, local, min(memories))


def ranks_per_host(sizes: Sequence[int]) -> int:
    """Returns how many ranks each host has, from what each rank says of its own; refuses unlike hosts on every rank."""
    if len(set(sizes)) > 1:
        raise UsageError(
            f"links are measured among hosts of as many ranks, and some have {min(sizes)}, others {max(sizes)}: start "
            "as many on each, with -n"
        )
    return sizes[0]


def cluster_text(found: MeasuredLinks) -> str:
    """Returns the file of a cluster of these hosts.

    >>> print(cluster_text(MeasuredLinks(Links(Link(2e-05, 1e9)), None, 4, 1, 16e9)), end="")
    [nodes]
    count = 4
    devices = 1
    memory = "16 GB"
    <BLANKLINE>
    [links]
    between = { latency = "20 µs", bandwidth = "1 GB/s" }
    """
    links = found.links
    ways = {}
    if found.local > 1:
        ways["inside"] = links.inside
    if found.hosts > 1:
        ways["between"] = links.across()
    if found.shared is not None:
        ways["shared"] = found.shared
    lines = ["[nodes]", f"count = {found.hosts}", f"devices = {found.local}", f'memory = "{bytes_text(found.memory)}"']
    lines += ["", "[links]"]
    for name, link in ways.items():
        latency, bandwidth = seconds_text(link.latency_s), bytes_text(link.bytes_per_s)
        lines.append(f'{name} = {{ latency = "{latency}", bandwidth = "{bandwidth}/s" }}')
    if links.adding_bytes_per_s < float("inf"):
        lines.append(f'adding = "{bytes_text(links.adding_bytes_per_s)}/s"')
    if links.crowded < 1:
        lines.append(f"crowded = {links.crowded!r}")
    return "\n".join([*lines, ""])


def _shared(ranks: int, series: int) -> Link:
    tensors = [torch.zeros(size // 4) for size in SIZES]
    return fit([(float(one.nbytes * ranks), min(_series(one) for _ in range(series))) for one in tensors])


def _series(tensor: Any) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(tensor)
    return (time.perf_counter() - begin) / CALLS


def _memory(local: int) -> float:
    if visible_gpus():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
