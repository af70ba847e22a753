"""A model in stages is saved as the whole model, and goes on in any cut or in none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.errors import CheckpointError
from samestep.pipelines.pipeline import Pipeline
from samestep.testing import assert_same_bits

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.1),
}


def model(width=12):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.3))
    return nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), inner, nn.GELU(), nn.Linear(width, 4))


LAYERS = 7


def groups_of(module):
    """Weights that decay, and the rest."""
    names = dict(module.named_parameters())
    return [
        {"params": [each for each in names.values() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in names.values() if each.dim() < 2], "weight_decay": 0.0},
    ]


def dataset():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(0, 4, (40,), generator=generator))


def trained(path, cut, optimizer="adamw", stop=99, width=12):
    """Trains up to a step; returns this rank's parameters, the losses from where it began, and the whole state."""
    torch.set_num_threads(1)
    stages, schedule, ends = cut
    with samestep.world(pipeline=stages) as world:
        stage = Pipeline(model(width), world, F.cross_entropy, ends=ends, schedule=schedule)
        steering = OPTIMIZERS[optimizer](groups_of(stage))
        batches = samestep.shards(dataset(), world, batch_size=8)
        state = samestep.checkpoint(path, world, every=1, model=stage, optimizer=steering, data=batches)
        losses = []
        for _ in state.epochs(2):
            for batch in batches:
                stage.step(batch)
                steering.step()
                steering.zero_grad()
                state.commit()
                losses.append(batches.loss)
                if state.step == stop:
                    break
            if state.step == stop:
                break
        state.wait()
        own = {name: each.detach().clone() for name, each in stage.named_parameters()}
        return own, losses, stage.whole_state_dict(), steering.state_dict()


ONE = (1, "1f1b", (LAYERS,))
EARLY = (2, "1f1b", (2, LAYERS))
LATE = (2, "fill-drain", (5, LAYERS))
TURNS = (2, "interleaved", (1, 3, 5, LAYERS))


def merged(results):
    return dict(sorted((name, each) for own, *_ in results for name, each in own.items()))


@pytest.mark.parametrize("optimizer", ["adamw", "plain", pytest.param("sgd", marks=pytest.mark.prove)])
def test_a_run_goes_on_in_another_cut_bit_for_bit(two_ranks, tmp_path, optimizer):
    """Dropout included: what a layer draws does not depend on where it is computed."""
    never = two_ranks(trained, None, EARLY, optimizer)
    two_ranks(trained, tmp_path / "run", EARLY, optimizer, 4)
    after = two_ranks(trained, tmp_path / "run", LATE, optimizer, 7)
    last = two_ranks(trained, tmp_path / "run", TURNS, optimizer)
    assert after[0][1] + last[0][1] == never[0][1][4:]
    assert_same_bits(merged(last), merged(never))


def test_one_process_goes_on_with_it_and_back(two_ranks, tmp_path):
    never = trained(None, ONE)
    two_ranks(trained, tmp_path / "run", EARLY, "adamw", 3)
    middle = trained(tmp_path / "run", ONE, "adamw", 6)
    last = two_ranks(trained, tmp_path / "run", LATE, "adamw")
    assert middle[1] + last[0][1] == never[1][3:]
    assert_same_bits(merged(last), merged([never]))


def test_the_unsplit_model_and_its_optimizer_load_it(two_ranks, tmp_path):
    results = two_ranks(trained, tmp_path / "run", TURNS, "adamw")
    with samestep.world() as world:
        alone = model()
        steering = OPTIMIZERS["adamw"](groups_of(alone))
        batches = samestep.shards(dataset(), world, batch_size=8)
        state = samestep.checkpoint(tmp_path / "run", world, model=alone, optimizer=steering, data=batches)
    assert state.resumed
    assert state.step == 10
    assert list(results[0][2]) == list(alone.state_dict())
    for _, _, whole, _ in results:
        assert_same_bits(whole, dict(alone.state_dict()))
    names = dict(alone.named_parameters())
    for own, _, _, saved in results:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        order = [name for name in own if own[name].dim() > 1] + [name for name in own if own[name].dim() < 2]
        for number, name in zip(numbers, order, strict=True):
            assert_same_bits(steering.state[names[name]], saved["state"][number])
    assert steering.param_groups[1]["weight_decay"] == 0.0


def test_a_model_that_was_saved_in_one_piece_goes_on_in_stages(two_ranks, tmp_path):
    with samestep.world() as world:
        alone = model()
        steering = OPTIMIZERS["adamw"](groups_of(alone))
        batches = samestep.shards(dataset(), world, batch_size=8)
        state = samestep.checkpoint(tmp_path / "run", world, model=alone, optimizer=steering, data=batches)
        for x, y in batches:
            F.cross_entropy(alone(x), y).backward()
            steering.step()
            steering.zero_grad()
            state.commit()
        state.save()
    results = two_ranks(stopped_at_once, tmp_path / "run")
    assert_same_bits(results[0], dict(alone.state_dict()))


def stopped_at_once(path):
    with samestep.world(pipeline=2) as world:
        stage = Pipeline(model(), world, F.cross_entropy, ends=LATE[2])
        steering = OPTIMIZERS["adamw"](groups_of(stage))
        batches = samestep.shards(dataset(), world, batch_size=8)
        samestep.checkpoint(path, world, model=stage, optimizer=steering, data=batches)
        return stage.whole_state_dict()


def refused(path, width, alike):
    with samestep.world(pipeline=2) as world:
        stage = Pipeline(model(width), world, F.cross_entropy, ends=EARLY[2])
        groups = groups_of(stage) if alike or world.rank else list(stage.parameters())
        steering = OPTIMIZERS["adamw"](groups)
        batches = samestep.shards(dataset(), world, batch_size=8)
        try:
            samestep.checkpoint(path, world, model=stage, optimizer=steering, data=batches)
        except CheckpointError as error:
            return str(error)
        return "loaded"


def test_another_model_is_refused_by_every_stage(two_ranks, tmp_path):
    two_ranks(trained, tmp_path / "run", EARLY, "adamw", 2)
    for said in two_ranks(refused, tmp_path / "run", 10, True):
        assert "step-00000002 does not fit, nothing was loaded" in said
        assert "has shape [12, 6] in the checkpoint, [10, 6] here" in said


def test_optimizers_with_other_groups_on_other_stages_are_refused(two_ranks, tmp_path):
    two_ranks(trained, tmp_path / "run", EARLY, "adamw", 2)
    for said in two_ranks(refused, tmp_path / "run", 12, False):
        assert "optimizer has 1 and 2 groups of parameters on the stages: give it the same on each" in said


def test_a_state_with_something_missing_or_beside_is_refused():
    with samestep.world() as world:
        stage = Pipeline(model(), world, F.cross_entropy, ends=[LAYERS])
        state = stage.state_dict()
        with pytest.raises(RuntimeError, match=r"the state has other, which it has not"):
            stage.load_state_dict(state | {"other": torch.ones(1)})
        del state["4.bias"]
        with pytest.raises(RuntimeError, match=r"the state lacks 4\.bias"):
            stage.load_state_dict(state)
        assert stage.load_state_dict(state, strict=False).missing_keys == ["4.bias"]


def with_a_stage_without_weights(path):
    with samestep.world(pipeline=2) as world:
        torch.manual_seed(0)
        stage = Pipeline(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), world, F.cross_entropy, ends=[1, 2])
        steering = torch.optim.AdamW([{"params": list(stage.parameters())}], lr=0.01)
        batches = samestep.shards(dataset(), world, batch_size=8)
        state = samestep.checkpoint(path, world, model=stage, optimizer=steering, data=batches)
        for batch in batches:
            stage.step(batch)
            steering.step()
            steering.zero_grad()
            state.commit()
        state.save()
        return bool(state.resumed), stage.whole_state_dict()


def test_a_stage_may_have_no_weights(two_ranks, tmp_path):
    assert [resumed for resumed, _ in two_ranks(with_a_stage_without_weights, tmp_path / "run")] == [False, False]
    assert [resumed for resumed, _ in two_ranks(with_a_stage_without_weights, tmp_path / "run")] == [True, True]
