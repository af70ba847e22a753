"""A network that is slow for everybody: no alarm, nobody blamed, and the communication named as what takes the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import hosts

from samestep.reporting.run_log import open_run

TRAIN = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(512, 512))  # a megabyte of gradients
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
until = torch.tensor(time.monotonic() + float(sys.argv[1]))
dist.broadcast(until, 0)  # one clock: the hosts are network namespaces of one machine
steps = torch.zeros(1)
while True:
    over = torch.tensor(float(time.monotonic() > until))
    dist.all_reduce(over)
    if over:
        break
    model(torch.ones(4, 512)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("seconds", [9, pytest.param(300, marks=[pytest.mark.prove, pytest.mark.timeout(700)])])
def test_a_slow_link_is_no_hang_and_no_slow_rank(tmp_path: Path, seconds: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    environment = {**os.environ, "SAMESTEP_TOKEN": "between these two hosts alone", "OMP_NUM_THREADS": "1"}
    with hosts(tmp_path, 2, servers=False) as lab:
        for name in lab.names:
            lab.limit(name, "40mbit")
        started: list[Any] = []
        for number, name in enumerate(lab.names):
            where = ["--nnodes", "2", "--node-rank", str(number), "--rendezvous", f"{lab.address('node1')}:29517"]
            options = [
                "-n",
                "1",
                "--start",
                "fork",
                "--hang-after",
                "2",
                "--run-dir",
                "run",
                "--json",
                f"{number}.json",
            ]
            words = [sys.executable, "-P", "-m", "samestep", "run", *where, *options, "train.py", str(seconds)]
            piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment, "cwd": tmp_path}
            started.append(lab.start(name, words, **piped))
        said = [process.communicate(timeout=seconds + 200)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "no progress for" not in said[0]
    assert "is slow: its own" not in said[0]
    assert said[0].count("in messages, and none is slower than the others: the network is slow") >= 1, said[0]
    assert json.loads((tmp_path / "0.json").read_text(encoding="utf-8"))["failure"] is None
    run = open_run(tmp_path / "run")
    assert {event["kind"] for event in run.launcher_events} == {"network"}
    for log in run.attempt(0):
        spent = {name: sum(event["spent"].get(name, 0.0) for event in log.steps) for name in ("wait", "collective")}
        assert sum(spent.values()) > 0.7 * sum(event["seconds"] for event in log.steps[1:])
