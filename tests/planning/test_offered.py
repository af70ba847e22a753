"""What clusters offer: closed forms on one switch, shared ports, memory of one host, and a hundred thousand ranks."""

from __future__ import annotations

from functools import partial

import pytest

from samestep.network import formulas
from samestep.network.cluster import parse
from samestep.network.links import Link, Links
from samestep.planning.offered import Offered

BETWEEN = 'between = { latency = "5 us", bandwidth = "10 GB/s" }\n'
INSIDE = 'inside = { latency = "1 us", bandwidth = "100 GB/s" }\n'
N = 64e6


def cluster(count, devices=1, more="", network=""):
    return parse(f"[nodes]\ncount = {count}\ndevices = {devices}\n[links]\n{BETWEEN}{INSIDE}{more}{network}")


def seconds(fabric, replicas, stages=1, nbytes=N):
    return {one.name: one.link.seconds(nbytes) for one in fabric.sums(replicas, stages, nbytes)}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 12, 16, 21])
@pytest.mark.parametrize("adding", ["", 'adding = "20 GB/s"\n'])
def test_on_one_switch_all_cost_what_their_closed_forms_say(ranks, adding):
    links = Links(Link(5e-6, 10e9), adding_bytes_per_s=20e9 if adding else float("inf"))
    found = seconds(Offered(cluster(ranks, more=adding)), ranks)
    forms = {
        "ring": formulas.ring,
        "halving and doubling": formulas.halving_doubling,
        "recursive doubling": formulas.recursive_doubling,
        "binomial tree": formulas.binomial_tree,
        "1 server": partial(formulas.parameter_server, servers=1),
        f"{ranks} servers": partial(formulas.parameter_server, servers=ranks),
        "segmented ring of 2": partial(formulas.segmented_ring, segments=2),
    }
    for name, form in forms.items():
        assert found[name] == pytest.approx(form(ranks, N, links), rel=1e-6), name


@pytest.mark.parametrize(("hosts", "devices"), [(2, 4), (4, 2), (3, 3)])
def test_hierarchical_all_reduces_cost_what_their_closed_form_says(hosts, devices):
    links = Links(Link(1e-6, 100e9), Link(5e-6, 10e9), local=devices)
    found = seconds(Offered(cluster(hosts, devices)), hosts * devices)[f"hierarchical {hosts}x{devices} (ring)"]
    assert found == pytest.approx(formulas.hierarchical(hosts * devices, N, links), rel=1e-6)


def test_a_ring_over_hosts_in_order_crosses_with_one_message_each():
    assert seconds(Offered(cluster(4, 4)), 16)["ring"] == pytest.approx(
        formulas.ring(16, N, Links(Link(5e-6, 10e9))), rel=1e-6
    )


def test_the_sums_of_all_stages_share_the_ports():
    fabric = Offered(cluster(4, 2))
    alone, beside = seconds(Offered(cluster(4)), 4)["ring"], seconds(fabric, 4, stages=2)["ring"]
    latency = 6 * 5e-6
    assert beside - latency == pytest.approx(2 * (alone - latency), rel=1e-6)


def test_stages_next_to_each_other_have_the_slowest_link_on_their_way():
    assert Offered(cluster(2, 4)).hop(4, 2) == Link(1e-6, 100e9)  # both stages on one host
    assert Offered(cluster(4, 1)).hop(1, 4) == Link(5e-6, 10e9)
    assert Offered(cluster(2, 2)).hop(1, 4) == Link(5e-6, 10e9)  # 1 to 2 leaves the host


def test_memory_is_offered_where_all_ranks_are_on_one_host():
    fabric = Offered(cluster(2, 4, 'shared = { latency = "100 us", bandwidth = "8 GB/s" }\n'))
    assert seconds(fabric, 4)["shared memory"] == pytest.approx(100e-6 + 4 * N / 8e9)
    assert seconds(fabric, 2, stages=2)["shared memory"] == seconds(fabric, 4)["shared memory"]
    assert "shared memory" not in seconds(fabric, 8)


def test_a_network_that_is_in_the_way_costs_more():
    full = seconds(Offered(cluster(16, network='[network]\nkind = "fat-tree"\nhosts = 4')), 16)
    half = seconds(Offered(cluster(16, network='[network]\nkind = "fat-tree"\nhosts = 4\noversubscription = 4')), 16)
    assert half["recursive doubling"] > 2 * full["recursive doubling"]
    assert half["ring"] == pytest.approx(full["ring"])


@pytest.mark.parametrize(
    "network",
    [
        pytest.param('kind = "torus"\ndims = [40, 50, 50]', marks=pytest.mark.prove),
        'kind = "fat-tree"\nhosts = 250',
        pytest.param('kind = "slim-fly"\nq = 37\np = 37', marks=pytest.mark.prove),
    ],
)
def test_a_hundred_thousand_ranks_are_counted_on_every_network(network):
    found = Offered(cluster(100_000, network=f"[network]\n{network}")).sums(100_000, 1, N)
    assert len(found) == 7
    for one in found:
        assert one.link.latency_s >= 2 * 5e-6
        assert one.link.bytes_per_s < 10e9


def test_of_few_ranks_everything_is_offered():
    names = [one.name for one in Offered(cluster(4, 4)).sums(16, 1, N)]
    assert len(names) == 12
    assert {"double tree", "16 servers", "torus 4x4", "hierarchical 4x4 (halving and doubling)"} <= set(names)
