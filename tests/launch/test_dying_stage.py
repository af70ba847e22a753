"""A stage that dies in the middle of a step: the others stop, and the last lines name it."""

from __future__ import annotations

import pytest

BODY = """
import samestep
import torch
from torch import nn
from samestep.pipelines.pipeline import Pipeline

class Layer(nn.Linear):
    calls = 0
    def forward(self, x):
        Layer.calls += 1
        if Layer.calls == 22 and rank == int(sys.argv[1]):
            {end}
        return super().forward(x)

with samestep.world(pipeline=2) as world:
    layers = nn.Sequential(Layer(6, 6), Layer(6, 6))
    stage = Pipeline(layers, world, nn.functional.mse_loss, ends=[1, 2], micro_batches=4)
    while True:
        stage.step((torch.ones(8, 6), torch.zeros(8, 6)))
"""


RAISES = ("raise ValueError('broken')", 1, "ValueError: broken")
KILLED = ("os.kill(os.getpid(), signal.SIGKILL)", 137, "it was killed by SIGKILL (signal 9)")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # for which the session's fork server has imported torch


@pytest.mark.parametrize(
    ("rank", "end", "code", "said"),
    [
        (0, *RAISES),
        (1, *KILLED),
        pytest.param(0, *KILLED, marks=pytest.mark.prove),
        pytest.param(1, *RAISES, marks=pytest.mark.prove),
    ],
    ids=["first raises", "last killed", "first killed", "last raises"],
)
def test_the_stage_that_died_is_named(folder, rank, end, code, said):
    done = folder.run("-n", 2, folder.script(BODY.format(end=end)), rank, env=ONE_THREAD)
    assert done.returncode == code, done.stderr
    assert f"rank {rank} of 2 failed: {said}" in done.stderr
    assert f"rank {1 - rank} lost its connection to it" in done.stderr
    assert f"rank {1 - rank} was at train.py:" in done.stderr
    assert folder.result["failure"]["rank"] == rank


IN_A_BACKWARD = """
import samestep
import torch
from torch import nn
from samestep.pipelines.pipeline import Pipeline

class Layer(nn.Linear):
    calls = 0
    def forward(self, x):
        Layer.calls += 1
        if x.requires_grad:
            x.register_hook(self.back)
        return super().forward(x)
    def back(self, _):
        if Layer.calls > 22 and rank == 3:
            raise ValueError("broken")

with samestep.world(pipeline=2) as world:
    layers = nn.Sequential(Layer(6, 6), Layer(6, 6))
    stage = Pipeline(layers, world, nn.functional.mse_loss, ends=[1, 2], micro_batches=4)
    while True:
        stage.step((torch.ones(8, 6), torch.zeros(8, 6)))
"""


def test_a_stage_that_dies_in_its_backward_ends_its_own_replica_and_the_others(folder):
    done = folder.run("-n", 4, folder.script(IN_A_BACKWARD), env=ONE_THREAD)
    assert done.returncode == 1, done.stderr
    assert "rank 3 of 4 failed: ValueError: broken" in done.stderr
    assert "ranks 0-2 lost their connection to it" in done.stderr
    assert folder.result["failure"]["rank"] == 3
