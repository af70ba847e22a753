"""Runs in which a rank is stuck: explained by `samestep run` from outside, whatever holds the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from samestep import cli
from samestep.events import Reader

SCRIPT = """
    import ctypes, os, signal, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rank, fault = dist.get_rank(), sys.argv[1]
    model = torch.nn.parallel.DistributedDataParallel(net) if fault == "uneven" else net

    def compute():
        sum(range(2_000_000)), time.sleep(0.1)  # computes enough to be seen, and leaves the cores to other tests

    def loop():
        while True: compute()

    def native():
        mutex = ctypes.create_string_buffer(64)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # waits for itself, and holds the interpreter

    def frozen():
        os.kill(os.getpid(), signal.SIGSTOP)

    def skipped():
        dist.barrier()

    def asleep():
        time.sleep(9)  # the fault itself

    def uneven():
        dist.barrier()  # rank 1 has no batch any more, and thinks that the epoch is over

    def prepares():
        if rank == 1:
            until = time.monotonic() + 14
            while time.monotonic() < until: compute()
        dist.barrier()

    def step(pause=0.0):
        model(torch.ones(2)).sum().backward()
        time.sleep(pause)  # a step that takes longer
        optimizer.step()
        dist.all_reduce(torch.ones(1))

    def train(faulty):
        for number in range(40):
            if number == 20 and rank == 1:
                faulty()
            step(pause=0.1 if fault == "asleep" and number > 20 else 0.0)

    def healthy():
        for number in range(int(sys.argv[3])):
            if number % 250 == 100 and rank == 0:
                net.eval()
                until = time.monotonic() + 5
                while time.monotonic() < until:
                    net(torch.ones(2))
                    compute()
            if number % 250 == 200 and rank == 1:
                with open(sys.argv[2], "wb") as file:
                    for _ in range(100):
                        file.write(bytes(1 << 20))
                        time.sleep(0.05)  # a slow disk
            step(pause=1.5 if number % 400 == 300 else 0.0)

    {"healthy": healthy, "prepares": prepares}.get(fault, lambda: train(globals()[fault]))()
    dist.destroy_process_group()
"""
STUCK = ("loop", "native", "frozen", "skipped", "uneven")


Done = subprocess.CompletedProcess[str]


def run(folder: Path, fault: str, *options: str, steps: int = 0) -> Done:
    """Runs the script with a fault; instead of arguments there are the failure, the stacks and the events."""
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    words = ["run", "-n", "2", "--run-dir", fault, "--json", f"{fault}.json", *options, "train.py", fault, "saved"]
    command = [sys.executable, "-m", "samestep", *words, str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    told = json.loads((folder / f"{fault}.json").read_text(encoding="utf-8"))
    stacks = {path.name: path.read_text(encoding="utf-8") for path in (folder / fault).rglob("rank*.stacks")}
    events = [*Reader(folder / fault / "events.jsonl").events()]
    return subprocess.CompletedProcess([told["failure"], stacks, events], done.returncode, "", done.stderr)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What became of each, all at once: most of their time they wait."""
    folder = tmp_path_factory.mktemp("hangs")

    def one(fault: str) -> Done:
        options = ["--hang-after", "1" if fault == "prepares" else "3"]
        options += ["--on-hang", "stop"] if fault in {"loop", "native", "frozen", "prepares"} else []
        return run(folder, fault, *options, steps=150)

    with ThreadPoolExecutor(8) as pool:
        faults = ("prepares", "asleep", "healthy", *STUCK)
        return dict(zip(faults, pool.map(one, faults), strict=True))


@pytest.mark.parametrize(
    ("fault", "words", "line"),
    [
        (
            "loop",
            "rank 1 is computing but does not finish a step; rank 0 is waiting for it",
            "sum(range(2_000_000)), time.sleep(0.1)",
        ),
        ("native", "rank 1 is asleep; rank 0 is waiting for it", "holds the interpreter"),
        ("frozen", "rank 1 is frozen, by SIGSTOP, Ctrl-Z or a debugger; rank 0 is waiting for it", "kill -CONT"),
        ("skipped", "the ranks wait in different collectives, each for the others", "dist.barrier()"),
        ("uneven", "the ranks wait in different collectives, each for the others", "dist.barrier()"),
    ],
)
def test_a_rank_that_is_stuck_is_named_with_its_line(runs: dict[str, Done], fault: str, words: str, line: str) -> None:
    failure, stacks, events = runs[fault].args
    said = runs[fault].stderr
    assert runs[fault].returncode == 124, said
    assert words in said
    (event,) = events
    assert line in said
    where = "the all-reduce of a backward pass at train.py" if fault == "uneven" else "all_reduce, collective"
    assert f"rank 0 in {where}" in said
    assert ("model(torch.ones(2)).sum().backward()" if fault == "uneven" else "dist.all_reduce(torch.ones(1))") in said
    if fault == "uneven":
        assert "flight recorder, group 0 default_pg: rank 0 collective" in said
        assert "all_reduce of [6], not done; rank 1 collective" in said
    assert failure["exception"] == "Hang"
    assert {"rank0.stacks", "rank1.stacks"} <= set(stacks)
    assert (event["kind"], event["step"], 1 in event["ranks"]) == ("hang", 20, True)
    assert words in event["text"]


def test_what_goes_on_by_itself_is_waited_for(runs: dict[str, Done]) -> None:
    said = runs["asleep"].stderr
    assert runs["asleep"].returncode == 0, said
    assert "rank 1 is asleep; rank 0 is waiting for it" in said
    assert said.count("no progress for") == 1
    assert "progress again after" in said
    kinds = [event["kind"] for event in runs["asleep"].args[2]]
    assert [kind for kind in kinds if kind in {"hang", "moves"}] == ["hang", "moves"]


def test_what_is_done_before_the_first_step_is_told_of_and_never_stopped(
    runs: dict[str, Done],
) -> None:
    said = runs["prepares"].stderr
    assert runs["prepares"].returncode == 0, said
    assert "rank 1 is computing but does not finish a step; rank 0 is waiting for it" in said
    assert "sum(range(2_000_000)), time.sleep(0.1)" in said
    assert "before the second step much takes long that is right, so it is waited for: Ctrl-C ends it" in said


def test_healthy_steps_raise_no_alarm(runs: dict[str, Done]) -> None:
    assert_healthy(runs["healthy"])


@pytest.mark.prove
def test_a_thousand_healthy_steps_raise_no_alarm(tmp_path: Path) -> None:
    assert_healthy(run(tmp_path, "healthy", "--hang-after", "4", steps=1000))


def assert_healthy(done: Done) -> None:
    assert done.returncode == 0, done.stderr
    assert "no progress for" not in done.stderr
    assert "hang" not in [event["kind"] for event in done.args[2]]


@pytest.mark.parametrize("given", [["--hang-after", "0"], ["--hang-after", "soon"], ["--on-hang", "pray"]])
def test_what_is_no_such_time_or_choice_is_refused_in_one_line(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *given, "train.py"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
