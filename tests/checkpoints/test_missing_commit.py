"""What a new user forgets, or meets first: commit(), the name of an option, a Ctrl-C, the loss after a resume."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.errors import UsageError


def epochs(path, *, commit=True, learn=True, name_data=True, every=None, number=2, leave=False):
    """Trains; returns the warnings with their files, and the loss as each epoch's body ends."""
    losses = []
    with samestep.world(device="cpu") as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = samestep.replicate(torch.nn.Linear(4, 3), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(TensorDataset(torch.ones(12, 4), torch.arange(12) % 3), world, batch_size=4)
        data = {"data": batches} if name_data else {}
        state = samestep.checkpoint(path, world, every=every, model=model, optimizer=optimizer, **data)
        losses.append(batches.loss)
        for _ in state.epochs(number):
            for x, y in batches:
                loss = batches.mean(F.cross_entropy(model(x), y, reduction="none"))
                if learn:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if commit:
                    state.commit()
            losses.append(batches.loss)
            if leave:
                break
    return [(str(one.message), one.filename) for one in seen], losses


@pytest.mark.parametrize(
    ("script", "warned"),
    [
        ({"commit": False}, "in which the optimizer stepped and commit() was not called"),
        ({"commit": False, "every": 1}, "commit() was never called: nothing was saved"),
        ({}, None),
        ({"commit": False, "learn": False}, None),  # epochs that evaluate
        ({"commit": False, "name_data": False}, None),  # there is nothing to commit
    ],
)
def test_a_forgotten_commit_is_warned_of_at_the_script_s_line_and_nothing_else_is(tmp_path, script, warned):
    seen, _ = epochs(tmp_path / "run", **script)
    assert [file for _, file in seen] == ([] if warned is None else [__file__] * 2)
    assert all(warned in text for text, _ in seen)


@pytest.mark.parametrize("learn", [True, False])
def test_after_a_resume_the_loss_is_that_of_the_last_step_before_it(tmp_path, learn):
    _, (before, last) = epochs(tmp_path / "run", every=3, number=1, leave=True, learn=learn)
    _, (resumed, again, following) = epochs(tmp_path / "run", every=3)
    assert math.isnan(before)
    assert resumed == again == last  # the epoch's steps were all saved: its loop is empty
    assert not learn or following < last


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"evry": 100}, "evry=int cannot be saved: .*; is the option every= meant\\?$"),
        ({"keepeach": 3}, "keepeach=int cannot be saved: .*; is the option keep_each= meant\\?$"),
        ({"guard": None}, "guard=None cannot be saved: it has no state_dict\\(\\) and load_state_dict\\(\\)$"),
    ],
)
def test_an_option_that_is_misspelt_is_not_taken_for_an_object_without_a_word(tmp_path, given, told):
    with samestep.world(device="cpu") as world, pytest.raises(UsageError, match=told):
        samestep.checkpoint(tmp_path, world, model=torch.nn.Linear(1, 1), **given)


SCRIPT = """
import os, sys
import torch
import samestep

with samestep.world() as world:
    model = torch.nn.Linear(2, 1)
    state = samestep.checkpoint(sys.argv[1], world, every=2, model=model)
    for epoch in state.epochs(1):
        for step in range(int(sys.argv[2])):
            state.commit()
        state.wait()
        print("ready", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (
            3,
            "interrupted after step 3; run/step-00000002 is the newest checkpoint, from which the same command resumes",
        ),
        (1, "interrupted after step 1; nothing was saved in run yet, the same command begins anew"),
    ],
)
def test_a_ctrl_c_says_what_is_saved(tmp_path, steps, told):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", "run", str(steps)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert f"samestep: {told}\n" in err
