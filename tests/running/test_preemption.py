"""Asked to make room, all ranks save the same step and leave; nothing is lost when they come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samestep.running.preemption import Preemption
from samestep.runtime.step import StepState

SCRIPT = """
import os, signal, sys, time
import torch, samestep
from torch.utils.data import TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 4, dtype=torch.float64)
with samestep.world() as world:
    if "own" in sys.argv:
        signal.signal(signal.SIGUSR1, lambda *_: open(f"own{world.rank}", "w").close())
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
    torch.save([p.detach() for p in model.parameters()], f"end{world.rank}.pt")
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

    def end(self, rank=0):
        return (self.folder / f"end{rank}.pt").read_bytes()


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    whole = Training(tmp_path_factory.mktemp("whole"))
    process = whole.start()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return whole.end()


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def resume(training, uninterrupted):
    """Starts the same command again, which must go on and end as if nothing had been."""
    code, out, err = finish(training.start())
    assert code == 0, err
    assert "goes on from saved/" in err
    assert "finished 32" in out
    assert training.end() == uninterrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_launcher_passes_a_request_on_and_nothing_is_lost(training, uninterrupted, number):
    process = training.start("slow")
    training.running()
    process.send_signal(number)
    code, _, err = finish(process)
    name = signal.Signals(number).name
    assert code == 75, err
    assert f"preempted by {name}: saved step" in err
    assert f"samestep: preempted by {name}: step " in err
    assert json.loads((training.folder / "result.json").read_text()) | {"run_dir": ""} == {
        "exit": 75, "run_dir": "", "failure": None,
    }  # fmt: skip
    resume(training, uninterrupted)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_to_one_rank_stops_all_at_the_same_step(training, uninterrupted, rank):
    process = training.start("slow")
    os.kill(training.running()[rank], signal.SIGUSR1)
    code, _, err = finish(process)
    assert code == 75, err
    assert err.count("saved step") == 1
    resume(training, uninterrupted)


def test_workers_of_a_data_loader_outlive_a_signal_to_the_whole_group(training, uninterrupted):
    process = training.start("slow", "workers")
    for pid in training.running():
        os.killpg(pid, signal.SIGTERM)  # every rank leads a group of its own, its workers in it
    code, _, err = finish(process)
    assert code == 75, err
    assert "DataLoader worker" not in err
    resume(training, uninterrupted)


def test_a_second_request_does_not_disturb_the_first(training, uninterrupted):
    process = training.start("slow")
    ranks = training.running()
    process.send_signal(signal.SIGTERM)
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75, err
    resume(training, uninterrupted)


def test_ctrl_c_after_a_request_does_not_wait(training):
    process = training.start("slow")
    training.running()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] in {130, 143, 75}


def test_a_handler_of_the_scripts_own_is_respected(training):
    process = training.start("slow", "own")
    os.kill(training.running()[0], signal.SIGUSR1)
    code, out, _ = finish(process)
    assert code == 0
    assert "finished 32" in out
    assert (training.folder / "own0").exists()


def test_one_process_without_a_launcher_saves_too(training):
    (training.folder / "runs").mkdir()
    process = subprocess.Popen(
        [sys.executable, "train.py", "slow"], cwd=training.folder, stderr=subprocess.PIPE, text=True
    )
    training.running(ranks=1)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75
    assert "preempted by SIGTERM: saved step" in err
    assert list(Path(training.folder / "saved").glob("step-*"))


def test_ranks_that_slurm_will_soon_end_save_and_leave_before(training, uninterrupted, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 6))
    code, _, err = finish(training.start("slow"))
    assert code == 75, err
    assert err.count("samestep: the time limit is ") == 1
    assert err.count("samestep: out of time: saved step ") == 1
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    resume(training, uninterrupted)


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
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, first], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 75, done.stderr
    assert "preempted by SIGTERM: saved step 1 in new/" in done.stderr


def test_the_last_to_close_gives_the_signals_back_but_not_those_that_the_script_has_taken():
    step = StepState(listens=True)
    one, other = Preemption(step), Preemption(step)
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
