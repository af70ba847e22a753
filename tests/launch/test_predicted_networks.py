"""All-reduces between hosts of limited bandwidth, beside what is predicted of them from links measured there.

Links are measured as `samestep bench links` does, every algorithm is then carried out by the engine, and priced by
:mod:`samestep.network.cost`. The kernel limits what a host sends and what it receives; it lets 16 KiB pass at once, so
that the sizes here are well above.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from long_cable import ADDRESSES, long_cable
from namespaces import hosts

SECRET = "between these hosts alone"
MOST_OFF = 0.15  # of the measured time
MEASURE = """
import json, sys, time
from statistics import median
import torch, torch.distributed as dist
import samestep
from samestep.bench.links import MESSAGES
from samestep.collectives import engine
from samestep.collectives.choose import CANDIDATES
from samestep.collectives.measure import measure
from samestep.collectives.point_to_point import PointToPoint
from samestep.network.cost import price

with samestep.world(backend="gloo", device="cpu") as world:
    group = dist.new_group(backend="gloo")
    links = measure(group, 1, sizes=MESSAGES)
    transport = PointToPoint(group)
    found = []
    for nbytes in map(int, sys.argv[1:]):
        for plan in CANDIDATES["all_reduce"](world.size, float(nbytes), links, 0):
            times = []
            for _ in range(6):
                buffer = torch.ones(nbytes // 4)
                dist.barrier()
                begin = time.perf_counter()
                engine.run(plan, buffer, transport)
                took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                times.append(float(took))
                assert buffer[0] == world.size
            found.append((plan.name, nbytes, median(times[1:]), price(plan, nbytes, links).seconds))
    if world.is_first:
        print("FOUND", json.dumps({"links": str(links), "found": found}), flush=True)
"""


def measured(lab, folder, *sizes, meet_at=None):
    """Measures on all hosts, which meet at an address, the first one's by default.

    Returns (algorithm, bytes, seconds, predicted seconds).
    """
    (folder / "measure.py").write_text(MEASURE)
    started = []
    for number, name in enumerate(lab.names):
        where = ["--nnodes", str(len(lab.names)), "--node-rank", str(number)]
        meet = ["--rendezvous", f"{meet_at or lab.address('node1')}:29517", "--no-events"]
        words = [sys.executable, "-m", "samestep", "run", "-n", "1", *where, *meet, "measure.py", *map(str, sizes)]
        environment = {**os.environ, "SAMESTEP_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment, "cwd": folder}
        started.append(lab.start(name, words, **piped))
    said = [process.communicate(timeout=800)[0].decode() for process in started]
    assert not any(process.returncode for process in started), said
    line = next(one for one in said if "FOUND" in one).split("FOUND ")[1].splitlines()[0]
    told = json.loads(line)
    print(told["links"])
    for name, nbytes, took, predicted in told["found"]:
        times = f"{1e3 * took:8.1f} ms  predicted {1e3 * predicted:8.1f}  {predicted / took - 1:+.1%}"
        print(f"{name:24} {nbytes:9d}  {times}")
    return told["found"]


@pytest.mark.prove
@pytest.mark.timeout(1700)
@pytest.mark.parametrize(("count", "rate"), [(2, "200mbit"), (3, "200mbit"), (4, "200mbit"), (8, "100mbit")])
def test_every_algorithm_takes_what_was_predicted(tmp_path, count, rate):
    with hosts(tmp_path, count, servers=False) as lab:
        for name in lab.names:
            lab.narrow(name, rate)
        found = measured(lab, tmp_path, 4 << 20, 16 << 20)
    check(found)


@pytest.mark.prove
@pytest.mark.timeout(1700)
def test_every_algorithm_takes_what_was_predicted_over_a_long_cable(tmp_path):
    with hosts(tmp_path, 2, servers=False) as lab, long_cable(lab, 25e6, 0.002):
        found = measured(lab, tmp_path, 1 << 20, 4 << 20, meet_at=ADDRESSES[0])
    check(found)


def check(found):
    """Fails where a prediction is off by more than was promised."""
    off = {(name, nbytes): predicted / took - 1 for name, nbytes, took, predicted in found}
    crowds = {key for key in off if key[0].endswith("servers")}  # all to all at once: TCP divides ports unevenly
    missed = {key: each for key, each in off.items() if abs(each) > MOST_OFF and key not in crowds}
    assert not missed, missed
    assert max(abs(off[key]) for key in crowds) < 2 * MOST_OFF
