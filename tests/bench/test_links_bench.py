"""`samestep bench links`: what lies between real ranks, as a cluster file that `samestep plan` reads."""

from __future__ import annotations

import shlex

import pytest
from small import in_place_of_spawn

from samestep.bench.harness import Options
from samestep.cli import bench
from samestep.cli.bench import main
from samestep.errors import UsageError
from samestep.network.cluster import parse
from samestep.network.links import Link, Links
from samestep.planning import measure_cluster
from samestep.planning.measure_cluster import MeasuredLinks, cluster_text, ranks_per_host, run


def test_real_ranks_are_measured_and_the_file_is_read_again(two_ranks, monkeypatch):
    monkeypatch.setattr(measure_cluster, "spawn", in_place_of_spawn(two_ranks))
    report = run(Options(2, 2))
    found = parse(report.file)
    assert (found.nodes, found.devices) == (1, 2)
    assert 1e6 < found.memory < 1e14
    assert found.shared is not None
    for link in (found.links.inside, found.shared):
        assert 0 <= link.latency_s < 1
        assert link.bytes_per_s > 1e6
    assert "shared memory" in report.conclusion


@pytest.mark.parametrize(("hosts", "local"), [(1, 4), (4, 1), (3, 2)])
def test_a_file_says_what_was_found(hosts, local):
    inside, between = Link(2.5e-6, 20e9), Link(30e-6, 1.25e9)
    two = hosts > 1 and local > 1
    links = Links(inside if local > 1 else between, between if two else None, local if two else None)
    shared = Link(90e-6, 9e9) if hosts == 1 else None
    told = parse(cluster_text(MeasuredLinks(links, shared, hosts, local, 16e9)))
    assert (told.nodes, told.devices, told.links, told.shared) == (hosts, local, links, shared)


def test_hosts_of_unlike_numbers_of_ranks_are_refused_on_every_rank():
    assert ranks_per_host([2, 2, 2, 2]) == 2
    with pytest.raises(UsageError, match="some have 1, others 2: start as many on each"):
        ranks_per_host([2, 2, 1, 1])


def test_links_need_two_ranks():
    with pytest.raises(UsageError, match="links need 2 ranks or more"):
        run(Options(1, 2))


def test_other_benchmarks_have_no_file(tmp_path):
    with pytest.raises(UsageError, match="--write keeps the cluster file of `samestep bench links`, and this is step"):
        main(["step", "--write", str(tmp_path / "x.toml")])


def test_the_next_command_is_one_that_can_be_pasted(tmp_path, capsys) -> None:
    """Options stand before the script, which would get them otherwise."""
    file = tmp_path / "my cluster.toml"
    bench._write(file, "[nodes]\n")
    command = capsys.readouterr().out.split(" is written: ")[1].strip()
    assert shlex.split(command) == ["samestep", "plan", "--cluster", str(file), "train.py"]
