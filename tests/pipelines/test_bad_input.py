"""What people do wrong with pipelines ends in a right result, or in an error that names it, on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.errors import ModelError, UsageError
from samestep.pipelines.pipeline import Pipeline
from samestep.schedule.algorithms import ONE_STAGE_PER_RANK
from samestep.testing import assert_same_bits


class Gives(nn.Module):
    """Computes what it is told to."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


def model(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *between, nn.Linear(6, 6), nn.Linear(6, 4))


def batch(samples=8, *, length=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, 6) if length is None else (samples, length, 6)
    return torch.randn(shape, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def piped(world, whole, cut, schedule="1f1b", loss_fn=F.cross_entropy):
    count = len(list(whole))
    ends = (cut, count) if world.pipeline.size > 1 else (count,)
    return Pipeline(whole, world, loss_fn, ends=ends, schedule=schedule)


# --- activations -------------------------------------------------------------------------------

WRONG = {
    "a dictionary": (
        lambda x: {"h": x},
        lambda given: given["h"],
        "stage 0 gives a dict: between stages a tensor can be",
    ),
    "a number": (lambda x: (x, 3), lambda given: given[0], "stage 0 gives a tuple with a int: between stages"),
    "nothing": (lambda _: None, lambda _: torch.ones(2, 6), "stage 0 gives a NoneType: between stages"),
}


def given_between(name, cut):
    with samestep.world(pipeline=2) as world:
        first, second, _ = WRONG[name]
        stage = piped(world, model(Gives(first), Gives(second)), cut)
        return stage.step(batch())


@pytest.mark.parametrize(
    "name", ["a dictionary", *(pytest.param(name, marks=pytest.mark.prove) for name in list(WRONG)[1:])]
)
def test_activations_that_are_no_tensors_are_named_where_they_would_be_sent(two_ranks, name):
    with pytest.raises(samestep.RankFailure, match=r"(?s)rank 0 .*ModelError: " + WRONG[name][2]):
        two_ranks(given_between, name, 2)


def test_within_a_stage_they_are_nobodys_business(two_ranks):
    first, second = two_ranks(given_between, "a dictionary", 3)
    assert first == second


def changed_in_place(schedule, cut):
    with samestep.world(pipeline=2) as world:
        piped(world, model(nn.ReLU(inplace=True)), cut, schedule).step(batch())


@pytest.mark.parametrize(
    "schedule",
    [name if name == "zero-bubble" else pytest.param(name, marks=pytest.mark.prove) for name in ONE_STAGE_PER_RANK],
)
def test_a_stage_that_changes_its_inputs_in_place_is_named(two_ranks, schedule):
    said = r"(?s)rank 1 .*ModelError: stage 1 changes its inputs in place, which are another stage's outputs: begin it"
    with pytest.raises(samestep.RankFailure, match=said):
        two_ranks(changed_in_place, schedule, 1)


def evaluated_in_place(stages):
    with samestep.world(pipeline=stages) as world:
        given = batch()[0]
        before = given.clone()
        found = piped(world, model(nn.ReLU(inplace=True)), 1)(given)
        assert torch.equal(given, before)
        return {"outputs": found}


def test_in_an_evaluation_a_change_in_place_hurts_nobody(two_ranks):
    expected = evaluated_in_place(1)
    for found in two_ranks(evaluated_in_place, 2):
        assert_same_bits(found, expected)


# --- batches -----------------------------------------------------------------------------------


def of_any_shape(stages, schedule="1f1b"):
    """Sequences of other lengths, and other numbers of samples, in every step; the first lengths come again."""
    with samestep.world(pipeline=stages) as world:
        whole = model(nn.Tanh(), Gives(lambda x: (x, x.flip(1).detach())), Gives(lambda given: given[0] * given[1]))
        stage = piped(world, whole, 3, schedule, lambda o, y: F.cross_entropy(o.mean(1), y))
        found = {}
        for number, (samples, length) in enumerate(((10, 3), (7, 5), (10, 3), (1, 9), (3, 5), (13, 1))):
            stage.zero_grad()
            found[f"loss {number}"] = stage.step(batch(samples, length=length, seed=number))
            found |= {f"{name} {number}": each.grad.clone() for name, each in stage.named_parameters()}
        return found


@pytest.mark.parametrize(
    "schedule",
    [name if name == "zero-bubble" else pytest.param(name, marks=pytest.mark.prove) for name in ONE_STAGE_PER_RANK],
)
def test_batches_may_have_any_shape_in_any_step(two_ranks, schedule):
    expected = of_any_shape(1)
    results = two_ranks(of_any_shape, 2, schedule)
    for found in results:
        assert_same_bits(found, {name: expected[name] for name in found})
    assert {name for found in results for name in found} == expected.keys()


# --- ranks, stages and wrappers -----------------------------------------------------------------


def of_three():
    with pytest.raises(UsageError) as said, samestep.world(pipeline=2):
        pass
    return str(said.value)


def test_a_world_that_cannot_be_cut_into_pipelines_is_refused_on_all_ranks(three_ranks):
    for said in three_ranks(of_three):
        assert "a world of 3 cannot be cut into pipelines of 2" in said


class Narrow(nn.Module):
    """Between its two layers a list is alive, so that it can be cut nowhere."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        parts = x.chunk(2, 1)
        return self.second(self.first(x)) + torch.cat(parts, 1)[:, :4]


@pytest.mark.parametrize(
    ("whole", "error", "said"),
    [
        (model, UsageError, "4 stages of 3 layers: a stage must have one layer at least"),
        (Narrow, ModelError, "4 stages of Narrow: between first and second it cannot be cut, because a tuple"),
    ],
)
def test_more_stages_than_layers_are_refused(whole, error, said):
    with pytest.raises(error, match=said):
        samestep.plan_pipeline(whole(), batch(), F.cross_entropy, stages=4, repeats=1)


def wrapped():
    with samestep.world(pipeline=2) as world:
        stage, found = piped(world, model(), 1), []
        for wrap in (lambda: samestep.replicate(stage, world), lambda: DistributedDataParallel(stage)):
            with pytest.raises(ModelError) as said:
                wrap()
            found.append(str(said.value))
        return found


def test_a_stage_is_not_to_be_replicated_once_more(two_ranks):
    """DistributedDataParallel would write the parameters of one stage over those of another."""
    said = "a pipeline adds up its gradients over the replicas by itself: leave samestep.replicate and Distributed"
    for found in two_ranks(wrapped):
        assert [each[: len(said)] for each in found] == [said] * 2


def without_parameters(stages, path, optimizer, cuts):
    """A stage that has nothing to train; goes on from a checkpoint."""
    with samestep.world(pipeline=stages) as world:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4), nn.LogSoftmax(1))
        stage = piped(world, whole, cuts, loss_fn=F.nll_loss)
        made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](stage.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(made, 1)
        state = samestep.checkpoint(path, world, model=stage, optimizer=made)
        found = {}
        for number in range(3):
            found[f"loss {number}"] = stage.step(batch(seed=number))
            found[f"norm {number}"] = samestep.clip_grad_norm_(stage, 0.5)
            made.step()
            made.zero_grad()
            schedule.step()
        state.save()
        return found | stage.whole_state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.prove)])
def test_a_stage_without_parameters_has_an_optimizer_too(two_ranks, tmp_path, optimizer):
    """And its checkpoint is that of the whole model, into which one process, or another cut, can look."""
    expected = [without_parameters(1, str(tmp_path / "alone"), optimizer, 3) for _ in range(2)]
    for number, cut in enumerate((3, 2)):
        for found in two_ranks(without_parameters, 2, str(tmp_path / "cut"), optimizer, cut):
            assert_same_bits(found, expected[number])
