"""Every schedule with every feature at once, in 2 and in 4 stages, in one process and on ranks: the bits of one stage.

Uneven batches, some with fewer samples than micro-batches; padding that the loss ignores, weighed by tokens; a weight
of the first and the last stage; dropout; clipping by the norm of the whole model; two steps added up for each of the
optimizer; evaluations between; and a checkpoint in the middle, from which any number of ranks goes on.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.pipelines.pipeline import Pipeline
from samestep.schedule.algorithms import SCHEDULE_NAMES
from samestep.testing import assert_same_bits

IGNORED, TOKENS = -100, 12
BATCHES = ((10, 5), (7, 3), (3, 5), (2, 4), (9, 1), (4, 5), (5, 2), (11, 3))  # samples and tokens, uneven
ENDS = {1: (10,), 2: (4, 10), 4: (2, 4, 7, 10)}
INTERLEAVED = {2: (2, 4, 7, 10), 4: (1, 2, 3, 4, 5, 6, 8, 10)}


class Flat(nn.Module):
    def forward(self, x):
        return x.flatten(0, 1)


def model(dropout, dtype):
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.Embedding(TOKENS, 8), nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8),
        nn.Dropout(dropout), nn.GELU(), nn.Linear(8, TOKENS, bias=False), Flat(),
    )  # fmt: skip
    whole[8].weight = whole[0].weight
    return whole.to(dtype)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randint(0, TOKENS, BATCHES[number], generator=generator) for _ in range(2))
    y[torch.rand(y.shape, generator=generator) < 0.3] = IGNORED
    y[0, 0] = 1
    return x, y


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets.flatten())


def counted(targets):
    return (targets != IGNORED).sum()


def trained(ranks, schedule, path, updates, dropout=0.3, dtype=torch.float32, devices=None):
    """Goes on from `path` up to some updates, and saves; returns all that it has seen, by update."""
    with samestep.world(pipeline=ranks) as world:
        held = ranks if devices is None else len(devices)
        ends = INTERLEAVED[held] if schedule == "interleaved" and held > 1 else ENDS[held]
        name = schedule if held > 1 else "1f1b"
        options = {"ends": ends, "schedule": name, "weight": counted, "devices": devices}
        stage = Pipeline(model(dropout, dtype), world, loss, **options)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05)
        counter = {"done": 0}
        state = samestep.checkpoint(path, world, model=stage, optimizer=optimizer, counter=Counter(counter))
        found = {}
        while counter["done"] < updates:
            done = counter["done"]
            for number in (2 * done, 2 * done + 1):
                found[f"loss {number}"] = stage.step(batch(number))
            found[f"norm {done}"] = samestep.clip_grad_norm_(stage, 0.5)
            found |= {f"{name} {done}": one.grad.clone() for name, one in stage.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            stage.eval()
            found[f"outputs {done}"] = stage(batch(done)[0])
            stage.train()
            counter["done"] += 1
        state.save()
        return found | {f"state {name}": one for name, one in stage.whole_state_dict().items()}


class Counter:
    def __init__(self, held):
        self._held = held

    def state_dict(self):
        return dict(self._held)

    def load_state_dict(self, state):
        self._held.update(state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process finds."""
    return trained(1, "1f1b", str(tmp_path_factory.mktemp("whole")), 4)


def check(begun, alone, gone, whole):
    for found in (*begun, alone, *gone):
        parts = {name: each for name, each in found.items() if not name.startswith("state ")}
        assert_same_bits(parts, {name: whole[name] for name in parts})
    for found in gone:
        assert_same_bits(*({name: one for name, one in each.items() if name[:5] == "state"} for each in (found, whole)))
    names = {name for found in (*begun, alone, *gone) for name in found}
    assert names == whole.keys()


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_every_schedule_has_the_bits_of_one_stage_in_one_process(schedule, stages, whole, tmp_path):
    path, devices = str(tmp_path / "cut"), ["cpu"] * stages
    begun = trained(1, schedule, path, 2, devices=devices)
    alone = trained(1, schedule, path, 3)  # one stage goes on from it, and they from that
    check([begun], alone, [trained(1, schedule, path, 4, devices=devices)], whole)


IN_MAKE_TEST = {(2, "interleaved"), (4, "zero-bubble")}


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        pytest.param(ranks, name, marks=() if (ranks, name) in IN_MAKE_TEST else pytest.mark.prove)
        for ranks in (2, 4)
        for name in SCHEDULE_NAMES
    ],
)
def test_every_schedule_has_the_bits_of_one_process(schedule, ranks, whole, two_ranks, four_ranks, tmp_path):
    run = {2: two_ranks, 4: four_ranks}[ranks]
    begun = run(trained, ranks, schedule, str(tmp_path / "cut"), 2)
    alone = trained(1, schedule, str(tmp_path / "cut"), 3)  # one process goes on from it, and they from that
    check(begun, alone, run(trained, ranks, schedule, str(tmp_path / "cut"), 4), whole)


def test_without_dropout_it_is_the_model_with_whole_batches(tmp_path):
    """Whose weight is one, and whose norm torch computes."""
    found = trained(1, "1f1b", str(tmp_path / "run"), 4, dropout=0.0, dtype=torch.float64)
    whole = model(0.0, torch.float64)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for done in range(4):
        for number in (2 * done, 2 * done + 1):
            x, y = batch(number)
            each = loss(whole(x), y)
            each.backward()
            torch.testing.assert_close(found[f"loss {number}"], each.detach(), rtol=1e-11, atol=0)
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        torch.testing.assert_close(found[f"norm {done}"].double(), norm, rtol=1e-11, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    for name, each in whole.state_dict().items():
        torch.testing.assert_close(found[f"state {name}"], each, rtol=1e-9, atol=1e-11)
