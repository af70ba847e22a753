"""Compressed gradients between hosts: what goes over the wire, counted there, and on a slow one the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from namespaces import hosts

SECRET = "between these two hosts alone"
TRAIN = """
import sys, torch, samestep
from samestep.bench.workloads import WIDE

def sent():
    # without the headers (Ethernet, IPv4, TCP with its times): how many words of receipt go back is the kernel's choice
    with open("/proc/net/dev") as counters:
        told = next(line for line in counters if line.strip().startswith("eth0:"))
    *_, sent, packets = told.partition(":")[2].split()[:10]
    return int(sent) - 66 * int(packets)

def bytes_of(model, steps):
    # the least that a step sent: any other had something sent again, or signs of life in it
    x, found = torch.ones(16, 1024), []
    for step in range(steps + 2):  # after two the buckets stay
        world.barrier()
        before = sent()
        model(x).sum().backward()
        world.barrier()
        found.append(sent() - before)
    return min(found[2:])

with samestep.world() as world:
    plain = samestep.replicate(WIDE.network(), world, reduce="gloo")
    int8 = samestep.replicate(WIDE.network(), world, compress="int8")
    found = bytes_of(plain, 6), bytes_of(int8, 6), int8.compression.sent / 8
    if world.is_first:
        print("BYTES", *found, flush=True)
"""


def on_both(lab, folder, *command):
    """Runs a command on both hosts as one run; returns what each said."""
    started = []
    for number, name in enumerate(lab.names):
        where = ["--nnodes", "2", "--node-rank", str(number), "--rendezvous", f"{lab.address('node1')}:29517"]
        words = [sys.executable, "-P", "-m", "samestep", "run", "-n", "1", "--start", "fork", *where, *command]
        environment = {**os.environ, "SAMESTEP_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}  # the fork server's own
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment, "cwd": folder}
        started.append(lab.start(name, words, **piped))
    said = [process.communicate(timeout=1500)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return said


@pytest.mark.prove
def test_int8_puts_a_quarter_of_the_bytes_on_the_wire(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    with hosts(tmp_path, 2, servers=False) as lab:
        said, _ = on_both(lab, tmp_path, "train.py")
    plain, int8, told = map(float, said.split("BYTES ")[1].split()[:3])
    assert plain > 4 * 6 * 1024 * 1025  # all gradients, and what wraps them
    assert 0.25 < int8 / plain < 0.262
    assert told < int8 < 1.01 * told  # what it says that it sends, and what wraps it


@pytest.mark.prove
@pytest.mark.timeout(1700)
@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
def test_on_a_slow_link_a_step_is_three_times_as_quick(tmp_path, rate):
    with hosts(tmp_path, 2, servers=False) as lab:
        for name in lab.names:
            lab.limit(name, rate)
        said, _ = on_both(lab, tmp_path, "-m", "samestep", "bench", "compress", "--json", str(tmp_path / "found.json"))
    print(said)
    found = json.loads((tmp_path / "found.json").read_text())
    ratios = {one["name"]: one["ratio"]["median"] for one in found["comparisons"]}
    if rate == "100mbit":
        assert 1 / ratios["int8"] >= 3
