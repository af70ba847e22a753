"""`samestep doctor` on several hosts: real sshd's, networks and Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from namespaces import hosts
from slurm_cluster import slurm_cluster

from samestep.errors import UsageError
from samestep.launch.hosts.transport import VIAS, check_installed

DOCTOR = [sys.executable, "-P", "-m", "samestep", "doctor"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 2) as lab:
        yield lab


def told(folder, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Runs the doctor to its end; returns its exit code, what it has shown, and its lines."""
    command = [*DOCTOR, *options, "--json", "found.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # for which the session's fork server has imported torch
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=250, check=False, env=environment
    )
    assert (folder / "found.json").exists(), done.stderr
    return done.returncode, done.stdout, json.loads((folder / "found.json").read_text(encoding="utf-8"))["lines"]


QUICK = """
import sys
from samestep.cli import main
from samestep.doctor import software, trial
software.check = trial.check = lambda: ()
sys.exit(main(sys.argv[4:]))
"""


@pytest.fixture
def quick(lab, tmp_path_factory):
    """The options that lead to hosts whose doctors neither ask pip nor let ranks take a step."""
    folder = tmp_path_factory.mktemp("quick")
    (folder / "doctor.py").write_text(QUICK, encoding="utf-8")
    python = folder / "python"
    words = f"{sys.executable} -c 'exec(open(\"{folder}/doctor.py\").read())'"
    python.write_text(f'#!/bin/sh\n[ "$4" = doctor ] && exec {words} "$@"\nexec {lab.python} "$@"\n')
    python.chmod(0o755)
    return [*lab.reached, "--remote-python", str(python)]


def about(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["check"] == name]


def test_hosts_are_measured_against_each_other(tmp_path, quick):
    code, shown, lines = told(tmp_path, "--hosts", "node1,node2", *quick)
    assert code == 0, shown
    assert [line["host"] for line in about(lines, "disk speed")] == ["node1", "node2"]
    (links,) = about(lines, "links")
    assert re.match(r"1 pair, median \d", links["text"]), links
    assert [line["level"] for name in ("clocks", "shared folder") for line in about(lines, name)] == ["ok", "ok"]
    assert "all hosts: " in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


@pytest.mark.prove
@pytest.mark.parametrize("via", VIAS)
def test_every_host_looks_at_itself_and_they_are_measured_against_each_other(tmp_path, lab, via):
    try:
        check_installed(via)
    except UsageError as error:
        pytest.skip(str(error))
    code, shown, lines = told(tmp_path, "--hosts", "node1,node2", "--via", via, *lab.reached)
    assert code == 0, shown
    assert [line["host"] for line in about(lines, "step over gloo")] == ["node1", "node2"]
    (links,) = about(lines, "links")
    assert re.match(r"1 pair, median \d", links["text"]), links
    assert [line["level"] for name in ("clocks", "shared folder") for line in about(lines, name)] == ["ok", "ok"]
    assert "all hosts: " in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


def test_hosts_of_a_file_are_reached_by_pdsh_and_measured_on_the_interface_that_was_asked_for(tmp_path, quick):
    try:
        check_installed("pdsh")
    except UsageError as error:
        pytest.skip(str(error))
    (tmp_path / "hosts.txt").write_text("node1\nnode2\n")
    code, _, lines = told(tmp_path, "--hostfile", "hosts.txt", "--via", "pdsh", *quick, "--interface", "lo")
    assert code == 1
    assert [line["host"] for line in about(lines, "disk speed")] == ["node1", "node2"]
    (line,) = about(lines, "between hosts")
    assert "cannot reach host node2 on its lo, 127.0.0.1 (" in line["text"]


def test_a_host_that_nobody_knows_is_named_and_the_others_are_looked_at(tmp_path, quick):
    code, shown, lines = told(tmp_path, "--hosts", "node1,nowhere", *quick, "--wrong")
    assert code == 1
    (line,) = about(lines, "host")
    assert line["host"] == "nowhere"
    assert line["text"].startswith("its name is unknown")
    assert about(lines, "between hosts")[0]["text"] == "not measured, for want of nowhere"
    assert about(lines, "disk speed")[0]["host"] == "node1"
    assert "training would fail: 2 errors" in shown


@pytest.mark.prove
def test_hosts_that_cannot_hear_each_other_are_named(tmp_path, lab, quick):
    lab.separate("node1", "node2")
    try:
        code, _, lines = told(tmp_path, "--hosts", "node1,node2", *quick)
    finally:
        lab.heal("node1")
        lab.heal("node2")
    assert code == 1
    (line,) = about(lines, "between hosts")
    assert "host node1 cannot reach host node2" in line["text"], line
    assert [line["host"] for line in about(lines, "disk speed")] == ["node1", "node2"]


@pytest.mark.prove
def test_a_slow_cable_is_told_in_its_own_figures(tmp_path, lab):
    for name in lab.names:
        lab.narrow(name, "80mbit")
    try:
        code, _, lines = told(tmp_path, "--hosts", "node1,node2", *lab.reached)
    finally:
        for name in lab.names:
            lab.widen(name)
    assert code == 0
    (line,) = about(lines, "links")
    assert line["level"] == "note"
    rate = re.search(r"([\d.]+) MB/s", line["text"])
    assert rate, line
    assert 8 <= float(rate[1]) <= 10.5, line  # 80 Mbit/s, less what its packets are wrapped in


@pytest.mark.prove  # as tasks of mpiexec are: test_doctor_command
def test_tasks_of_srun_are_looked_at_together(tmp_path):
    with slurm_cluster(tmp_path / "slurm") as slurm:
        file = tmp_path / "found.json"
        done = slurm.run(["srun", "-N2", "-n2", *DOCTOR, "--json", file])
        assert done.returncode == 0, done.stdout + done.stderr
        lines = json.loads(file.read_text(encoding="utf-8"))["lines"]
        assert about(lines, "links")[0]["text"].startswith("1 pair, median ")
        assert about(lines, "Slurm")[0]["text"].endswith(", nodes: 2 mixed")
        assert done.stdout.count("training would work") == 1
