"""Asked to make room, all ranks save the same step and leave; nothing is lost when they come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import TensorDataset

import samestep
from samestep.checkpoints.shutdown import StopSignals
from samestep.errors import Preempted
from samestep.runtime.step_state import StepState
from samestep.testing import assert_same_bits

SCRIPT = """
import os, sys, time
import torch, samestep
from torch.utils.data import TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 4, dtype=torch.float64)
with samestep.world() as world:
    model = samestep.replicate(torch.nn.Linear(4, 1).double(), world)
    optimizer = torch.optim.Adam(model.parameters())
    batches = samestep.shards(TensorDataset(inputs), world, batch_size=8, workers=2 * ("workers" in sys.argv))
    state = samestep.checkpoint("saved", world, every="1 h", model=model, optimizer=optimizer, data=batches)
    for epoch in state.epochs(4):
        for (x,) in batches:
            batches.mean(model(x).square().squeeze(1)).backward()
            optimizer.step(); optimizer.zero_grad()
            if "slow" in sys.argv:
                with open(f"at{world.rank}.tmp", "w") as file:
                    file.write(f"{os.getpid()} {state.step}")
                os.rename(f"at{world.rank}.tmp", f"at{world.rank}")
                time.sleep(0.2)
            state.commit()
    print("finished", state.step)
"""


class Training:
    """A script in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)

    def start(self, *words, ranks=2):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = ["run", "-n", str(ranks), "--json", "result.json", "train.py", *words]
        command = [sys.executable, "-P", "-m", "samestep", *words]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **piped)

    def running(self, ranks=2, step=3):
        """Waits until every rank has come to a step; returns their processes."""
        files = [self.folder / f"at{rank}" for rank in range(ranks)]
        while True:  # the test's own deadline ends this
            told = [file.read_text().split() for file in files if file.exists()]
            if len(told) == ranks and all(int(at) >= step for _, at in told):
                return [int(pid) for pid, _ in told]
            time.sleep(0.02)


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def resume(training):
    """Starts the same command again, which must go on to the end."""
    code, out, err = finish(training.start())
    assert code == 0, err
    assert "resuming from saved/" in err
    assert "finished 32" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.prove)])
def test_the_launcher_passes_a_request_on_and_nothing_is_lost(training, number):
    process = training.start("slow")
    training.running()
    process.send_signal(number)
    code, _, err = finish(process)
    name = signal.Signals(number).name
    assert code == 75, err
    assert err.count("saved step") == 1
    assert f"preempted by {name}: saved step" in err
    assert f"samestep: preempted by {name}: step " in err
    assert json.loads((training.folder / "result.json").read_text()) | {"run_dir": ""} == {
        "exit": 75, "run_dir": "", "failure": None,
    }  # fmt: skip
    resume(training)


def test_workers_of_a_data_loader_outlive_a_signal_to_the_whole_group(training):
    process = training.start("slow", "workers")
    for pid in training.running():
        os.killpg(pid, signal.SIGTERM)  # every rank leads a group of its own, its workers in it
    code, _, err = finish(process)
    assert code == 75, err
    assert "DataLoader worker" not in err
    assert list((training.folder / "saved").glob("step-*"))


@pytest.mark.prove
def test_ctrl_c_after_a_request_does_not_wait(training):
    process = training.start("slow")
    training.running()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] in {130, 143, 75}


# --- ranks that send the signals to themselves -------------------------------------------------


def train(path, sent=()):
    """Trains 8 steps; `sent` are (step, rank, signal). Returns where the rank left, its steps, and the weights."""
    left = None
    with samestep.world(device="cpu") as world:
        torch.manual_seed(0)
        inputs = torch.randn(32, 4, dtype=torch.float64)
        model = samestep.replicate(torch.nn.Linear(4, 1).double(), world)
        optimizer = torch.optim.Adam(model.parameters())
        batches = samestep.shards(TensorDataset(inputs), world, batch_size=8)
        state = samestep.checkpoint(path, world, model=model, optimizer=optimizer, data=batches)
        try:
            for _ in state.epochs(2):
                for (x,) in batches:
                    batches.mean(model(x).square().squeeze(1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    for step, rank, number in sent:
                        if (step, rank) == (state.step + 1, world.rank):
                            os.kill(os.getpid(), number)
                    state.commit()
        except Preempted as preempted:
            left = preempted.step
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return left, state.step, model.state_dict()


@pytest.fixture(scope="module")
def uninterrupted(two_ranks, tmp_path_factory):
    return two_ranks(train, tmp_path_factory.mktemp("whole"))[0][2]


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    "sent",
    [
        [(3, 0, USR1)],
        [(3, 1, USR1)],
        [(3, 1, TERM)],
        [(3, 0, TERM), (3, 1, TERM), (3, 0, TERM), (4, 0, TERM), (4, 1, USR1)],
    ],
    ids=["rank 0", "rank 1", "SIGTERM", "several times"],
)
def test_a_request_to_any_rank_stops_all_at_the_same_step(two_ranks, tmp_path, uninterrupted, sent):
    told = two_ranks(train, tmp_path, sent)
    assert [one[:2] for one in told] == [(4, 4)] * 2
    assert [entry.name for entry in tmp_path.glob("step-*")] == ["step-00000004"]
    again = two_ranks(train, tmp_path)
    assert [one[:2] for one in again] == [(None, 8)] * 2
    assert_same_bits(again[0][2], uninterrupted)


def own_handler(path):
    """Rank 0 has a handler of its own, which is left alone."""
    called = []
    mine = lambda *_: called.append(1)  # noqa: E731
    signal.signal(signal.SIGUSR1, mine)
    try:
        left, steps, _ = train(path, [(3, 0, signal.SIGUSR1)])
        return left, steps, len(called), signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_handler_of_the_scripts_own_is_respected(two_ranks, tmp_path):
    assert two_ranks(own_handler, tmp_path) == [(None, 8, 1, True), (None, 8, 0, True)]


SEVERAL = """
import os, signal, sys
import torch, samestep

with samestep.world() as world:
    model = torch.nn.Linear(1, 1)
    old, new = (samestep.checkpoint(name, world, model=model) for name in ("old", "new"))
    if "closed" in sys.argv:
        old.close()
    if "dropped" in sys.argv:
        del old
    os.kill(os.getpid(), signal.SIGTERM)
    new.commit()
"""


@pytest.mark.parametrize("first", ["kept", "closed", "dropped"])
def test_whatever_becomes_of_another_checkpoint_a_request_reaches_this_one(tmp_path, first):
    """Without a launcher: the signal goes to the one process."""
    (tmp_path / "train.py").write_text(SEVERAL)
    done = subprocess.run(
        [sys.executable, "train.py", first], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 75, done.stderr
    assert "preempted by SIGTERM: saved step 1 to new/" in done.stderr
    assert [entry.name for entry in (tmp_path / "new").glob("step-*")] == ["step-00000001"]


def test_the_last_to_close_gives_the_signals_back_but_not_those_that_the_script_has_taken():
    step = StepState(requests_enabled=True)
    one, other = StopSignals(step), StopSignals(step)
    one.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    mine = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        other.close()
        assert mine is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
