"""The cluster that this machine is: as many ranks as it has GPUs or cores, and the links among them, measured."""

from __future__ import annotations

from samestep.launch.cpus import read_cores
from samestep.launch.rank.environment import threads_per_rank
from samestep.launch.resources import visible_gpus
from samestep.network.cluster import Cluster, parse

__all__: list[str] = []


def devices() -> int:
    """Returns how many ranks this machine has room for: one for each GPU; without, one for each core."""
    return visible_gpus() or read_cores().count


def threads() -> int:
    """Returns how many threads each rank has where all devices are used."""
    return threads_per_rank(devices())


def cluster() -> Cluster:
    """Returns this machine; with several devices its links are measured, which takes some seconds."""
    from samestep.bench.links import cluster_text, measure_cluster
    from samestep.launch.functions.spawn import spawn

    count = devices()
    if count < 2:
        return parse("[nodes]\ncount = 1", "this machine")
    return parse(cluster_text(spawn(measure_cluster, count, 3, progress=False)[0]), "this machine")
