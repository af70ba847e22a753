"""The all-reduces of clusters: prices of plans at one switch, shared ports, networks, and a hundred thousand ranks."""

from __future__ import annotations

import resource
import time

import pytest

from samestep.collectives import double_tree
from samestep.collectives.choose import possible_plans
from samestep.errors import UsageError
from samestep.network.cluster import parse
from samestep.network.links import Link
from samestep.network.pricing import contended_price, price
from samestep.planning.fabric import CHUNKS, ClusterFabric, count_all_reduces

BETWEEN = 'between = { latency = "5 us", bandwidth = "10 GB/s" }\n'
INSIDE = 'inside = { latency = "1 us", bandwidth = "40 GB/s" }\n'
N = 64e6
SIZES = (0.0, 1e3, 1e6, 3e7)


def cluster(count, devices=1, more="", network=""):
    return parse(
        f"[nodes]\ncount = {count}\ndevices = {devices}\n[links]\n{BETWEEN}{INSIDE}{more}\n[network]\n{network}"
    )


def seconds(fabric, replicas, stages=1, nbytes=N):
    return {one.name: one.link.seconds(nbytes) for one in fabric.all_reduces(replicas, stages, nbytes)}


@pytest.mark.parametrize(
    ("count", "devices", "more"),
    [
        (1, 1, ""),
        (3, 1, 'adding = "7 GB/s"'),
        (8, 1, 'adding = "300 MB/s"\ncrowded = 0.8'),
        (1, 4, 'adding = "7 GB/s"'),
        (2, 4, 'adding = "7 GB/s"'),
        (4, 2, 'adding = "7 GB/s"\nnics = 2'),
        pytest.param(17, 1, 'adding = "7 GB/s"', marks=pytest.mark.prove),
        pytest.param(3, 4, 'adding = "7 GB/s"\nnics = 4', marks=pytest.mark.prove),
    ],
)
def test_on_one_switch_every_all_reduce_is_the_price_of_its_plan(count, devices, more):
    told = cluster(count, devices, more)
    found = count_all_reduces(told, told.ranks)
    for nbytes in SIZES:
        for plan in possible_plans("all_reduce", told.ranks, nbytes, told.links, 0):
            if not plan.name.startswith("double tree"):
                expected = price(plan, nbytes, told.links).seconds
                (lines,) = found[plan.name]
                assert lines.seconds(nbytes) == pytest.approx(expected, rel=1e-12), (plan.name, nbytes)
        for chunks, lines in list(zip(CHUNKS, found["double tree"], strict=True))[::3]:
            expected = price(double_tree.all_reduce(told.ranks, chunks), nbytes, told.links).seconds
            assert lines.seconds(nbytes) == pytest.approx(expected, rel=1e-12), (chunks, nbytes)


@pytest.mark.parametrize(
    "network",
    ['kind = "torus"\ndims = [4, 8]', 'kind = "fat-tree"\nhosts = 8\noversubscription = 4', 'kind = "slim-fly"\nq = 4'],
)
@pytest.mark.parametrize("placement", ["linear", "random"])
def test_on_a_network_all_reduces_are_what_contention_says(network, placement):
    told = cluster(32, network=f'{network}\nplacement = "{placement}"')
    found = count_all_reduces(told, 32)
    for plan in possible_plans("all_reduce", 32, 1e7, told.links, 0):
        if plan.name in ("ring", "halving and doubling", "recursive doubling", "binomial tree"):
            expected = contended_price(plan, 1e7, told.topology, told.place(32), told.routing)
            assert found[plan.name][0].seconds(1e7) == pytest.approx(expected.seconds, rel=1e-12)
            assert found[plan.name][0].rounds == expected.rounds


def test_a_ring_over_hosts_in_order_crosses_with_one_message_each():
    assert seconds(ClusterFabric(cluster(4, 4)), 16)["ring"] == pytest.approx(30 * (5e-6 + N / 16 / 10e9), rel=1e-6)


def test_the_best_chunks_are_taken_for_each_number_of_bytes():
    trees = count_all_reduces(cluster(64), 64)["double tree"]
    best = [min(CHUNKS, key=lambda each: trees[CHUNKS.index(each)].seconds(n)) for n in (1.0, 1e5, 1e6, 1e9)]
    assert best == [1, 2, 8, 64]


def test_the_all_reduces_of_several_stages_share_the_hosts_ports():
    alone = seconds(ClusterFabric(cluster(4)), 4)["ring"]
    beside = seconds(ClusterFabric(cluster(4, 2)), 4, stages=2)["ring"]
    latency = 6 * 5e-6
    assert beside - latency == pytest.approx(2 * (alone - latency), rel=1e-6)


def test_stages_next_to_each_other_have_the_slowest_link_between_them():
    assert ClusterFabric(cluster(2, 4)).stage_link(4, 2) == Link(1e-6, 40e9)  # both stages on one host
    assert ClusterFabric(cluster(4, 1)).stage_link(1, 4) == Link(5e-6, 10e9)
    assert ClusterFabric(cluster(2, 2)).stage_link(1, 4) == Link(5e-6, 10e9)  # 1 to 2 leaves the host


def test_a_fabric_that_is_better_scales_its_links():
    fabric = ClusterFabric(cluster(4, 1), only="ring")
    better = ClusterFabric(cluster(4, 1), latency_scale=0.5, bandwidth_scale=2, only="ring")
    (one,), (two,) = fabric.all_reduces(4, 1, N), better.all_reduces(4, 1, N)
    assert two.link.latency_s == one.link.latency_s / 2
    assert two.link.bytes_per_s == pytest.approx(2 * one.link.bytes_per_s)
    assert better.stage_link(1, 4) == Link(2.5e-6, 20e9)
    (coded,) = ClusterFabric(cluster(4), bytes_scale=0.25, coding_s=1e-9, only="ring").all_reduces(4, 1, N)
    assert 1 / coded.link.bytes_per_s == pytest.approx(0.25 / one.link.bytes_per_s + 1e-9)


def test_memory_is_used_where_all_ranks_are_on_one_host():
    fabric = ClusterFabric(cluster(2, 4, 'shared = { latency = "100 us", bandwidth = "8 GB/s" }'))
    assert seconds(fabric, 4)["shared memory"] == pytest.approx(100e-6 + 4 * N / 8e9)
    assert seconds(fabric, 2, stages=2)["shared memory"] == seconds(fabric, 4)["shared memory"]
    assert "shared memory" not in seconds(fabric, 8)


def test_a_network_that_is_in_the_way_costs_more():
    full = seconds(ClusterFabric(cluster(16, network='kind = "fat-tree"\nhosts = 4')), 16)
    half = seconds(ClusterFabric(cluster(16, network='kind = "fat-tree"\nhosts = 4\noversubscription = 4')), 16)
    assert half["recursive doubling"] > 2 * full["recursive doubling"]
    assert half["ring"] == pytest.approx(full["ring"])


def test_of_few_ranks_everything_is_counted():
    names = seconds(ClusterFabric(cluster(4, 4)), 16)
    assert len(names) == 12
    assert {"double tree", "16 servers", "torus 4x4", "hierarchical 4x4 (halving and doubling)"} <= set(names)


def test_of_many_ranks_what_takes_long_to_count_is_left_out():
    assert len(ClusterFabric(cluster(4096, network='kind = "fat-tree"\nhosts = 64')).all_reduces(4096, 1, N)) == 7


def test_one_rank_has_nothing_to_send():
    assert {one.seconds(1e9) for some in count_all_reduces(cluster(1), 1).values() for one in some} == {0.0}


def test_more_ranks_than_the_cluster_has_are_refused():
    with pytest.raises(UsageError, match="10 ranks do not fit 3 hosts of 3 devices: give 1 to 9"):
        count_all_reduces(cluster(3, 3), 5, stages=2)


LARGE = {
    "torus": 'kind = "torus"\ndims = [50, 40, 50]',
    "fat tree": 'kind = "fat-tree"\nports = 74',
    "Slim Fly": 'kind = "slim-fly"\nq = 41',
}


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("network", LARGE.values(), ids=LARGE)
def test_a_hundred_thousand_ranks_are_counted_in_seconds(network):
    begun, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = count_all_reduces(cluster(100_000, network=network), 100_000, few=100_000)
    taken = time.process_time() - begun
    print(f"{network}: {taken:.1f} s, {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024:.0f} MB more")
    assert len(found) == 9
    assert taken < 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20
    assert all(one.seconds(1e8) >= 2 * 5e-6 for some in found.values() for one in some)
