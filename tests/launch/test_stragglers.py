"""Which rank makes the others wait, and with what: from paces that are made up, and in real runs."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from samestep.launch.monitor.heartbeat import StepTiming
from samestep.launch.monitor.stragglers import Stragglers
from samestep.reporting.run_log import open_run


def lines(own, data=(0.0, 0.0, 0.0), *, loads=(0, 0, 0), floor=0.0, looks=60, seed=0, noise=0.05):
    """What is said in so many looks at three ranks, whose own work and data take so long, on so much; by look.

    Every look sees one step more, whose messages take `floor` seconds more.
    """
    stragglers, chance, said = Stragglers(), random.Random(seed), []
    spent = [dict.fromkeys(("at", "waited", "data"), 0.0) for _ in own]
    for look in range(looks):
        works = [chance.gauss(1.0, noise) * (each(look) if callable(each) else each) for each in own]
        whole = max(work + wait for work, wait in zip(works, data, strict=True)) + floor
        for rank, (times, work, wait) in enumerate(zip(spent, works, data, strict=True)):
            times["at"] += whole
            times["waited"] += whole - work - wait
            times["data"] += wait
            load = (look + 1.0) * loads[rank]
            stragglers.add(StepTiming(rank=rank, step=look + 1, non_training=0.0, load=load, **times))
        said += [(look, line) for _, _, line in stragglers.found(range(len(own)), spent[0]["at"])]
    return said


@pytest.mark.parametrize("since", [0, 40, 100])
@pytest.mark.parametrize("times", [1, 0.25, 0.05])
def test_the_rank_whose_own_work_takes_longest_is_named_once_within_20_steps(since, times):
    """Steps of 500, 125 and 25 ms."""
    slow = lambda look: times * (0.5 if look >= since else 0.2)  # noqa: E731
    ((look, line),) = lines([times * 0.2, times * 0.2, slow], looks=since + 60)
    assert look < since + 20
    assert line.startswith("rank 2 is slow: its own work takes ")
    assert "the others wait for it" in line


def test_a_rank_that_waits_for_its_data_is_told_so():
    ((_, line),) = lines([0.2, 0.2, 0.2], [0.01, 0.3, 0.01])
    assert line.startswith(
        "rank 1 is slow: it waits 300 ms a step for data, the others 10 ms; the others wait for it 5"
    )


def test_a_rank_with_larger_batches_is_told_so_with_what_they_cost():
    ((_, line),) = lines([0.2, 0.2, 0.5], loads=(100, 100, 240))
    assert line.startswith("rank 2 has more to do: its batches are 2.4 times as large as the others', and take ")
    assert re.search(r"the others wait for it (5[789]|60)% of the time. Deal samples out by their cost", line)


@pytest.mark.parametrize("loads", [(100, 100, 110), (100, 100, 140), (100, 100, 60), (0, 0, 0)])
def test_larger_batches_excuse_nobody_who_is_slower_than_they_make_him(loads):
    ((_, line),) = lines([0.2, 0.2, 0.5], loads=loads)
    assert line.startswith("rank 2 is slow: its own work takes ")


def test_who_keeps_up_again_is_told_too():
    said = lines([0.2, 0.2, lambda look: 0.5 if look < 15 else 0.2], looks=60)
    assert [line.split(":")[0] for _, line in said] == ["rank 2 is slow", "rank 2 is no longer slow"]


@pytest.mark.parametrize("noise", [0.05, 0.3])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(2, 20))])
def test_healthy_ranks_raise_no_alarm(seed, noise):
    one_long_step = lambda look: 5.0 if look == 20 else 0.3  # noqa: E731
    assert lines([0.3, one_long_step, 0.33], [0.02, 0.03, 0.02], looks=1000, seed=seed, noise=noise) == []


@pytest.mark.parametrize("length", [1, 5, 10])
def test_a_rank_that_is_held_up_for_some_steps_is_not_named(length):
    held_up = lambda look: 0.09 if look % 50 < length else 0.03  # noqa: E731
    assert lines([0.03, held_up, 0.03], looks=1000) == []


def test_a_network_that_is_slow_for_all_is_told_as_that():
    ((_, line),) = lines([0.02, 0.02, 0.02], floor=0.4)
    assert line.startswith("all ranks spend 95% of a step (421 ms) in messages, and none is slower than the others")
    assert lines([0.01, 0.01, 0.01], floor=0.03) == []
    assert lines([0.2, 0.2, 0.2], floor=0.1) == []


def standing(*spent):
    """What a display shows of ranks whose own work, and whose waiting, take so long in each of 20 steps."""
    stragglers = Stragglers()
    for rank, (own, waited) in enumerate(spent):
        for step in (0, 10, 20):
            stragglers.add(
                StepTiming(
                    rank=rank, step=step, at=step * (own + waited), waited=step * waited, data=0.0, non_training=0.0
                )
            )
    return stragglers.pace_summary(range(len(spent)))


def test_a_display_says_how_long_the_ranks_wait_and_for_whom():
    assert standing((0.2, 0.2), (0.2, 0.2), (0.4, 0.0)) == "waiting 33%  slowest rank 2 (2.0x)"
    assert standing((0.3, 0.1), (0.3, 0.1)) == "waiting 25%"
    assert standing((0.3, 0.1)) == ""


def test_a_rank_alone_is_compared_with_nobody():
    assert lines([0.5], [0.0]) == []


TURNS = """
    import time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(45):
        time.sleep(0.15 if dist.get_rank() == 1 and step >= 20 else 0.05)
        model(torch.ones(4, 16)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_rank_that_turns_slow_is_named_within_20_steps_of_50_ms(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TURNS), encoding="utf-8")
    done = run(tmp_path, "--run-dir", "run", "train.py")
    assert done.returncode == 0, done.stderr
    named = [
        event
        for event in open_run(tmp_path / "run").launcher_events
        if event["kind"] == "straggler" and event["step"] > 20
    ]
    assert named[0]["text"].startswith("rank 1 is slow: its own work takes 1")
    assert named[0]["step"] <= 40


SCRIPT = """
    import sys, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    dist.init_process_group("gloo")
    kind, rank = sys.argv[1], dist.get_rank()

    class Samples(Dataset):
        def __len__(self):
            return 480

        def __getitem__(self, index):
            if kind == "data" and rank == 1:
                time.sleep(0.01)  # slow data
            return torch.ones(3 if kind == "larger" and rank == 0 else 1, 16)

    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Samples(), batch_size=16):
        time.sleep(0.15 if kind != "data" and rank == 0 else 0.05)  # the work of a step, and a slow rank's
        model(batch).mean().backward()
        optimizer.step()
    if rank == 0:
        from samestep.launch.rank import control
        print(control.pace())
    dist.destroy_process_group()
"""


def test_a_script_that_knows_nothing_of_it_has_its_slow_rank_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    def said(kind: str) -> str:
        done = run(tmp_path, "--run-dir", kind, "train.py", kind)
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    with ThreadPoolExecutor(3) as pool:
        compute, data, larger = pool.map(said, ("compute", "data", "larger"))
    assert "rank 0 is slow: its own work takes" in compute
    assert compute.count("is slow") == 1
    assert re.search(r"waiting \d+%  slowest rank 0 \([23]\.\dx\)", compute), compute
    assert "rank 1 is slow: it waits" in data
    assert "for data" in data
    assert "rank 0 has more to do: its batches are 3.0 times as large as the other" in larger
