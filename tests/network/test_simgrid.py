"""The same rounds in SimGrid, which follows every message in time: Debian's python3-simgrid, skipped where it is not.

Star, torus and fat tree are SimGrid's own, routing included, so
both constructions are compared; a Slim Fly it does not know is given route by route, so only times are.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from message_simulator import messages_of, play
from ways import flow

from samestep.collectives import halving, tree
from samestep.network import placement
from samestep.network.links import Link
from samestep.network.messages import send
from samestep.network.pricing import PlacedNetwork
from samestep.network.routing import MINIMAL
from samestep.network.topologies.fat_tree import FatTree
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.topology import LinkTypes, Switch
from samestep.network.topologies.torus import Torus

LINK = Link(1e-6, 12.5e9)
CABLES = LinkTypes(LINK)
PYTHON = "/usr/bin/python3"
N = 16e6


@cache
def reason_to_skip():
    if shutil.which(PYTHON) is None:
        return f"there is no {PYTHON}"
    done = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, check=False, timeout=60)
    return "" if done.returncode == 0 else f"{PYTHON} has no simgrid: apt-get install python3-simgrid"


def case_of(network):
    if isinstance(network, Switch):
        return {"network": "star", "hosts": network.hosts}
    if isinstance(network, Torus):
        return {"network": "torus", "dims": network.dims[::-1]}  # SimGrid's first dimension changes fastest
    if isinstance(network, FatTree):
        return {"network": "fat tree", "down": network.down, "up": network.up}
    pairs = [(a, b) for a in range(network.hosts) for b in range(network.hosts) if a != b]
    ways = [(a, b, list(flow(network, MINIMAL, a, b))) for a, b in pairs]
    return {"network": "routes", "hosts": network.hosts, "routes": ways}


@cache
def simulated(network, choice, ranks):
    """SimGrid's seconds of every round; asked once for a network and a placement."""
    if reason_to_skip():
        pytest.skip(reason_to_skip())
    placed = choice(network, ranks)
    messages = [[(placed.hosts[a], placed.hosts[b], n) for a, b, n in one] for one in patterns(ranks)]
    case = {**case_of(network), "bytes_per_s": LINK.bytes_per_s, "latency_s": LINK.latency_s, "rounds": messages}
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("simgrid_rounds.py")],
        input=json.dumps(case, default=int),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def both(network, choice, ranks):
    """Seconds of every round, ours and SimGrid's."""
    theirs, placed = simulated(network, choice, ranks), PlacedNetwork(network, choice(network, ranks))
    rounds = [send(*zip(*((a, b) for a, b, _ in one), strict=True), 0, [n for *_, n in one]) for one in patterns(ranks)]
    return [placed.price([one], 1.0).seconds for one in rounds], theirs


def patterns(ranks):
    """The ring's round, all of halving and doubling and of a tree, and three shifts."""
    for distance in (1, 3, ranks // 2 - 1):
        yield [(rank, (rank + distance) % ranks, N / ranks) for rank in range(ranks)]
    yield from (*messages_of(halving.all_reduce(ranks), N), *messages_of(tree.all_reduce(ranks), N))


CASES = [
    (Switch(CABLES, 16), 16),
    (Torus(CABLES, (5, 5)), 25),
    (Torus(CABLES, (3, 3, 3)), 27),
    (FatTree(CABLES, (4, 4), (4,)), 16),
    (FatTree(CABLES, (4, 4), (2,)), 16),
    (FatTree(CABLES, (2, 2, 4), (2, 2)), 16),
    (SlimFly(CABLES, 3, 1), 18),
    (SlimFly(CABLES, 5, 1), 50),
]


@pytest.mark.parametrize(("network", "ranks"), CASES, ids=[network.name for network, _ in CASES])
def test_every_round_of_ranks_in_order_takes_as_long_in_simgrid(network, ranks):
    ours, theirs = both(network, placement.linear, ranks)
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize(("network", "ranks"), CASES, ids=[network.name for network, _ in CASES])
def test_all_rounds_of_ranks_at_random_take_as_long_in_simgrid(network, ranks):
    """On a torus a message may be held up on one link while another, busier one waits for it: 1 round in 20."""
    ours, theirs = both(network, placement.random, ranks)
    assert sum(ours) == pytest.approx(sum(theirs), rel=0.05)
    assert ours == pytest.approx(theirs, rel=0.2 if isinstance(network, Torus) else 0.05)


@pytest.mark.parametrize(("network", "ranks"), CASES, ids=[network.name for network, _ in CASES])
@pytest.mark.parametrize("choice", [placement.linear, placement.random])
def test_messages_followed_in_time_take_as_long_in_simgrid(network, ranks, choice):
    """Also where the load of links says too little: in both, rates are max-min fair, with shares by latency."""
    theirs, placed = simulated(network, choice, ranks), choice(network, ranks)
    ours = [play([one], network, placed, by_latency=True) for one in patterns(ranks)]
    assert ours == pytest.approx(theirs, rel=0.01)
