"""Clusters as files say them: what they mean, and what is said of mistakes."""

from __future__ import annotations

import pytest

from samestep.errors import UsageError
from samestep.network.cluster import load, parse
from samestep.network.links import Link
from samestep.network.messages import send
from samestep.network.pricing import PlacedNetwork

BETWEEN = '[links]\nbetween = { latency = "5 us", bandwidth = "10 Gbit/s" }\n'
INSIDE = 'inside = { latency = "1 us", bandwidth = "100 GB/s" }\n'


def shift(told, ranks, distance, nbytes):
    """What it costs that every rank sends so many bytes to the one so far on."""
    everyone = range(ranks)
    network = PlacedNetwork(told.topology, told.place(ranks), told.routing)
    return network.price([send(everyone, [(rank + distance) % ranks for rank in everyone])], nbytes)


def test_a_whole_file_is_read():
    told = parse(
        '[nodes]\ncount = 16\ndevices = 8\nmemory = "80 GB"\nspeed = 2.5\n'
        + BETWEEN
        + INSIDE
        + 'adding = "50 GB/s"\nnics = 4\n[network]\nkind = "fat-tree"\nhosts = 4\noversubscription = "2:1"\n'
        + 'hop = "0.5 us"\nrouting = "ecmp"\nplacement = "random"'
    )
    assert (told.ranks, told.memory, told.speed, told.routing.name) == (128, 80e9, 2.5, "ecmp")
    assert told.links.between == Link(5e-6, 1.25e9)
    assert (told.links.inside, told.links.local, told.links.nics) == (Link(1e-6, 100e9), 8, 4)
    assert told.topology.name == "fat tree 4x4, up 2"
    assert told.topology.link_types.port == Link(0.5e-6, 5e9)
    assert told.place(128).name == "random"


def test_hosts_with_one_device_have_one_kind_of_link():
    told = parse("[nodes]\ncount = 4\n" + BETWEEN)
    assert (told.links.inside, told.links.between, told.links.local) == (Link(5e-6, 1.25e9), None, None)
    assert told.is_flat


@pytest.mark.parametrize(
    ("network", "hosts"),
    [
        ('kind = "ring"', 16),
        ('kind = "torus"\ndims = [4, 4]', 16),
        ('kind = "fat-tree"\nports = 4', 16),
        ('kind = "dragonfly"\np = 2\na = 4\nh = 2', 72),
        ('kind = "slim-fly"\nq = 4', 96),
        ('kind = "switch"', 16),
    ],
)
@pytest.mark.parametrize("placement", ["linear", "random"])
def test_every_kind_places_ranks_on_its_hosts(network, hosts, placement):
    told = parse("[nodes]\ncount = 16\n" + BETWEEN + f'[network]\n{network}\nplacement = "{placement}"')
    assert told.topology.hosts == hosts
    assert len(set(told.place(16).hosts)) == 16


def test_a_torus_can_be_gone_round_like_a_snake():
    network = '[network]\nkind = "torus"\ndims = [4, 4]\nplacement = "snake"'
    told = parse("[nodes]\ncount = 16\n" + BETWEEN + network)
    assert shift(told, 16, 1, 1.0).contention == 1


@pytest.mark.parametrize("kind", ['"ring"', '"fat-tree"\nhosts = 4', '"switch"'])
def test_a_message_to_a_neighbour_takes_the_latency_of_the_file_and_a_hop_more_for_each_link_more(kind):
    told = parse("[nodes]\ncount = 8\n" + BETWEEN + f'[network]\nhop = "1 us"\nkind = {kind}')
    network = PlacedNetwork(told.topology, told.place(8))
    near, far = (network.price([send([0], [target])], 0.0).price.latency_s for target in (1, 7))
    assert near == pytest.approx(5e-6)
    assert far == pytest.approx({"ring": 5e-6, "fat-tree": 7e-6, "switch": 5e-6}[kind.split('"')[1]])
    assert shift(told, 8, 1, 1e6).price.transfer_s >= 1e6 / 1.25e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[nodes]\ncuont = 4", "cuont in [nodes] is unknown: did you mean count?"),
        ("[node]\ncount = 4", "node in the file is unknown: did you mean nodes?"),
        ("[links]\nlatency = 4", "latency in [links] is unknown: there are inside, between, shared, adding, nics"),
        (BETWEEN + "crowded = 1.5", "crowded is 1.5: give a part of the bandwidth, above 0 and at most 1"),
        (BETWEEN + "crowded = 0", "links.crowded is 0: give a number above 0"),
        ("nodes = 4", "nodes is 4: write it as a section, [nodes]"),
        ("[nodes]\ncount = 0\n" + BETWEEN, "nodes.count is 0: give a whole number, 1 or more"),
        ("[nodes]\ncount = true\n" + BETWEEN, "nodes.count is True: give a whole number, 1 or more"),
        ("[nodes]\nspeed = -1\n" + BETWEEN, "nodes.speed is -1: give a number above 0"),
        ("[nodes]\nspeed = nan\n" + BETWEEN, "nodes.speed is nan: give a number above 0"),
        ('[nodes]\nmemory = "80 Gb"\n' + BETWEEN, "the unit Gb is unknown: there are B, kB, MB, GB"),
        ('[nodes]\nmemory = "lots"\n' + BETWEEN, "nodes.memory is 'lots': give bytes such as"),
        ("[nodes]\ncount = 2", "there are 2 hosts and no links.between"),
        ("[nodes]\ndevices = 2", "there are 2 devices on a host and no links.inside"),
        ('[links]\nbetween = { latency = "5 us" }', "links.between lacks its bandwidth"),
        ('[links]\nbetween = { latency = "5 us", bandwidth = "0 GB/s" }', "above 0"),
        ('[links]\nbetween = { latency = "-5 us", bandwidth = "1 GB/s" }', "0 or more"),
        ('[links]\nbetween = { latency = "5 us", bandwidth = inf }', "above 0"),
        ('[links]\nbetween = "5 us"', "links.between is '5 us': give {"),
        (BETWEEN + '[network]\nkind = "tours"', "network.kind is 'tours': did you mean torus?"),
        (BETWEEN + '[network]\nkind = "torus"', "a torus needs network.dims"),
        (BETWEEN + '[network]\nkind = "torus"\nq = 5', "network.q is of a slim-fly, and kind is torus: leave it out"),
        (BETWEEN + '[network]\nkind = "slim-fly"\nq = 6', "there is no Slim Fly of q = 6: give a prime power, such as"),
        (BETWEEN + '[network]\nkind = "slim-fly"', "a slim-fly needs network.q"),
        (BETWEEN + '[network]\nkind = "fat-tree"', "a fat-tree needs network.hosts"),
        (BETWEEN + '[network]\nkind = "fat-tree"\nhosts = 6\noversubscription = 4', "6 hosts on a leaf are not over"),
        (
            BETWEEN + '[network]\nrouting = "adaptive"',
            "network.routing is 'adaptive': there are minimal, ecmp, valiant",
        ),
        (BETWEEN + '[network]\nplacement = "liner"', "network.placement is 'liner': did you mean linear?"),
        (BETWEEN + '[network]\nhop = "3 us"', "a message passes 2 links at least in 5e-06 s: give less"),
        (
            "[nodes]\ncount = 17\n" + BETWEEN + '[network]\nkind = "torus"\ndims = [4, 4]',
            "nodes.count is 17, and torus 4x4 holds 16 hosts: give fewer, or a larger network",
        ),
        ("[nodes", "is not valid TOML: expected"),
        (
            "nodes.count = 16\n" + BETWEEN + '[network]\nkind = "dragonfly"\np = 9999999999\na = 4\nh = 2\ng = 9',
            "links: give 100000000 at most",
        ),
        ("nodes.count = 100000000000\n" + BETWEEN, "are 100000000000 ranks: give 10000000 at most"),
        (BETWEEN + "[network]\nseed = -1", "network.seed is -1: give a whole number, 0 or more"),
        (BETWEEN + "[network]\nparts = 4", "network.parts is of valiant routing, and routing is minimal: leave it out"),
        (
            BETWEEN + "[network]\nkind = 'fat-tree'\nports = 4\nhosts = 4",
            "network.ports and network.hosts are both given: leave one of them out",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(text, said):
    with pytest.raises(UsageError) as caught:
        parse(text, "mine.toml")
    assert str(caught.value).startswith("mine.toml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[nodes]\nspeed = 1" + 400 * "0",
            "nodes.speed is 1000000000000000000000000000000000000000: give a number above 0",
        ),
        (
            "[nodes]\ncount = 2\n" + BETWEEN + "nics = 1" + 400 * "0",
            "links.nics is 1000000000000000000000000000000000000000: give a whole number, 1 or more",
        ),
        ("[nodes]\ncount = 1" + 5000 * "0", "its numbers are too long, or its lists too deep"),
    ],
    ids=["speed", "nics", "digits"],
)
def test_numbers_that_python_cannot_hold_are_said_in_a_line(text, said):
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert str(refused.value) == f"cluster.toml: {said}"


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="no such file: `samestep bench links --write"):
        load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is a folder: give the file in it"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "binary.toml")


def test_the_seed_is_the_placements():
    network = '[network]\nplacement = "random"\nseed = '
    first, same, other = (parse(f"nodes.count = 50\n{BETWEEN}{network}{seed}").place(50).hosts for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize(
    "kind", ["'fat-tree'\nhosts = 4", "'dragonfly'\np = 1\na = 4\nh = 2", "'slim-fly'\nq = 3\np = 1"]
)
def test_links_among_switches_are_as_wide_as_a_hosts_nics(kind):
    """Contention is what the network's own shape makes, with any number of NICs."""
    one, four = (parse(f"nodes.count = 8\n{BETWEEN}nics = {nics}\n[network]\nkind = {kind}") for nics in (1, 4))
    plain, wide = (shift(told, 8, 3, 1e6) for told in (one, four))
    assert wide.contention == pytest.approx(plain.contention)
    assert wide.price.transfer_s == pytest.approx(plain.price.transfer_s / 4)


def test_more_ranks_than_devices_do_not_fit():
    with pytest.raises(UsageError, match="9 ranks do not fit 4 hosts of 2 devices: give 1 to 8"):
        parse("[nodes]\ncount = 4\ndevices = 2\n" + BETWEEN + INSIDE).place(9)
