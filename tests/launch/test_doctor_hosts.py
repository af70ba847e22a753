"""`samestep doctor` on several hosts: real sshd's, networks and Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from namespaces import hosts
from slurm_cluster import slurm_cluster

from samestep.errors import UsageError
from samestep.launch.transport import VIAS, require

DOCTOR = [sys.executable, "-P", "-m", "samestep", "doctor"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 2) as lab:
        yield lab


def told(folder, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Runs the doctor to its end; returns its exit code, what it has shown, and its lines."""
    command = [*DOCTOR, *options, "--json", "found.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert (folder / "found.json").exists(), done.stderr
    return done.returncode, done.stdout, json.loads((folder / "found.json").read_text(encoding="utf-8"))["lines"]


def about(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["about"] == name]


@pytest.mark.parametrize("via", VIAS)
def test_every_host_looks_at_itself_and_they_are_measured_against_each_other(tmp_path, lab, via):
    try:
        require(via)
    except UsageError as error:
        pytest.skip(str(error))
    code, shown, lines = told(tmp_path, "--hosts", "node1,node2", "--via", via, "--ssh-args", lab.ssh_args)
    assert code == 0, shown
    assert [line["host"] for line in about(lines, "step over gloo")] == ["node1", "node2"]
    (links,) = about(lines, "links")
    assert re.match(r"1 pair, median \d", links["text"]), links
    assert [line["level"] for name in ("clocks", "shared folder") for line in about(lines, name)] == ["fine", "fine"]
    assert "all hosts: " in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


def test_a_host_that_nobody_knows_is_named_and_the_others_are_looked_at(tmp_path, lab):
    code, shown, lines = told(tmp_path, "--hosts", "node1,nowhere", "--ssh-args", lab.ssh_args, "--wrong")
    assert code == 1
    (line,) = about(lines, "host")
    assert line["host"] == "nowhere"
    assert line["text"].startswith("host nowhere: its name is unknown")
    assert about(lines, "between hosts")[0]["text"] == "not measured, for want of nowhere"
    assert about(lines, "step over gloo")[0]["host"] == "node1"
    assert "training would fail: 2 errors" in shown


def test_hosts_that_cannot_hear_each_other_are_named(tmp_path, lab):
    lab.separate("node1", "node2")
    try:
        code, _, lines = told(tmp_path, "--hosts", "node1,node2", "--ssh-args", lab.ssh_args)
    finally:
        lab.heal("node1")
        lab.heal("node2")
    assert code == 1
    (line,) = about(lines, "between hosts")
    assert "host node1 cannot reach host node2" in line["text"], line
    assert about(lines, "step over gloo")[0]["level"] == "fine"


def test_a_slow_cable_is_told_in_its_own_figures(tmp_path, lab):
    for name in lab.names:
        lab.narrow(name, "80mbit")
    try:
        code, _, lines = told(tmp_path, "--hosts", "node1,node2", "--ssh-args", lab.ssh_args)
    finally:
        for name in lab.names:
            lab.widen(name)
    assert code == 0
    (line,) = about(lines, "links")
    assert line["level"] == "note"
    rate = re.search(r"([\d.]+) MB/s", line["text"])
    assert rate, line
    assert 8 <= float(rate[1]) <= 10.5, line  # 80 Mbit/s, less what its packets are wrapped in


def test_tasks_of_srun_are_looked_at_together(tmp_path):
    with slurm_cluster(tmp_path / "slurm") as slurm:
        file = tmp_path / "found.json"
        done = slurm.run(["srun", "-N2", "-n2", *DOCTOR, "--json", file])
        assert done.returncode == 0, done.stdout + done.stderr
        lines = json.loads(file.read_text(encoding="utf-8"))["lines"]
        assert about(lines, "links")[0]["text"].startswith("1 pair, median ")
        assert about(lines, "Slurm")[0]["text"].endswith(", nodes: 2 mixed")
        assert done.stdout.count("training would work") == 1
