"""One weight of several layers is one weight also when they are in different stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.errors import ModelError
from samestep.pipelines.pipeline import Pipeline
from samestep.testing import assert_same_bits

TOKENS = 12


class Back(nn.Module):
    """The head of a language model, whose weight is that of the embedding; it is registered first."""

    def __init__(self):
        super().__init__()
        self.head, self.tokens, self.hidden = nn.Linear(8, TOKENS, bias=False), nn.Embedding(TOKENS, 8), nn.Linear(8, 8)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.tokens(x)))).flatten(0, 1)


def model():
    torch.manual_seed(0)
    return Back().double()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TOKENS, (8, 5), generator=generator), torch.randint(0, TOKENS, (8, 5), generator=generator)


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets.flatten())


def steps(stage, count, optimizer, clip=True):
    found = []
    for number in range(count):
        found.append(stage.step(batch(number)))
        found.append(stage.step(batch(number + 50)))  # a step of its own: gradients are added to the first's
        if clip:
            found.append(samestep.clip_grad_norm_(stage, 0.3))
        optimizer.step()
        optimizer.zero_grad()
    return found


def in_stages(ranks, path=None, count=3):
    with samestep.world(pipeline=ranks) as world:
        whole = model()
        plan = samestep.plan_pipeline(whole, batch(), loss, stages=ranks, micro_batches=4, schedule="1f1b", repeats=1)
        stage = samestep.pipeline(whole, world, plan)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
        state = None
        if path is not None:
            state = samestep.checkpoint(path, world, model=stage, optimizer=optimizer)
        found = steps(stage, count, optimizer)
        if state is not None:
            state.save()
        return (
            [each.detach() for each in found],
            stage.whole_state_dict(),
            sorted(name for name, _ in stage.named_parameters()),
        )


@pytest.fixture(scope="module")
def on_two_ranks(two_ranks, tmp_path_factory):
    """The path of a checkpoint, and what each of two ranks has found before."""
    path = str(tmp_path_factory.mktemp("ties") / "run")
    return path, two_ranks(in_stages, 2, path)


def test_copies_in_two_stages_have_the_bits_of_one_process(on_two_ranks):
    told, state, names = in_stages(1)
    assert names == ["head.weight", "hidden.bias", "hidden.weight", "tokens.weight"]
    for rank, (theirs, whole, own) in enumerate(on_two_ranks[1]):
        assert_same_bits(theirs, told)
        assert_same_bits(whole, state)
        assert ("tokens.weight" in own, "head.weight" in own) == (rank == 0, rank == 1)


def unsplit(count=3):
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    found = []
    for number in range(count):
        for seed in (number, number + 50):
            x, y = batch(seed)
            each = loss(whole(x), y)
            each.backward()
            found.append(each)
        found.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in found], whole, optimizer


def test_the_step_is_that_of_the_model_that_is_not_split(on_two_ranks):
    """Its norm counts the weight once, and its optimizer steps it once."""
    told, whole, _ = unsplit()
    theirs, state, _ = on_two_ranks[1][0]
    assert torch.allclose(
        torch.stack([each.double() for each in told]),
        torch.stack([each.double() for each in theirs]),
        rtol=1e-12,
        atol=0,
    )
    for name, value in whole.state_dict().items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-12), name


def resumed(ranks, path):
    with samestep.world(pipeline=ranks) as world:
        whole = model()
        plan = samestep.plan_pipeline(whole, batch(), loss, stages=ranks, micro_batches=4, schedule="1f1b", repeats=1)
        stage = samestep.pipeline(whole, world, plan)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
        samestep.checkpoint(path, world, model=stage, optimizer=optimizer)
        steps(stage, 2, optimizer)
        return stage.whole_state_dict()


def test_a_checkpoint_knows_one_weight(two_ranks, on_two_ranks):
    """What two ranks save goes on in one process, on two ranks, and in the model that is not split."""
    path, _ = on_two_ranks
    state = resumed(1, path)
    for whole in two_ranks(resumed, 2, path):
        assert_same_bits(whole, state)
    with samestep.world() as world:
        whole = model()
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
        samestep.checkpoint(path, world, model=whole, optimizer=optimizer)
        assert whole.head.weight is whole.tokens.weight
        right, _, expected = unsplit()
        assert len(optimizer.state_dict()["state"]) == len(expected.state_dict()["state"]) == 3
        for number, entry in expected.state_dict()["state"].items():
            assert torch.allclose(optimizer.state_dict()["state"][number]["exp_avg"], entry["exp_avg"], rtol=1e-9)
    assert right


def of_replicas(ranks, pipeline):
    with samestep.world(pipeline=pipeline) as world:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        whole[4].weight = whole[2].weight = whole[0].weight
        stage = Pipeline(whole, world, F.mse_loss, ends=[3, 5][2 - pipeline :], micro_batches=2)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 90, dtype=torch.float64).view(15, 6)
        batches = samestep.shards(TensorDataset(x, x.roll(1, 1)), world, batch_size=5, micro_batch_size=2)
        for micro in batches:
            stage.step(micro)
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                batches.commit()
        return stage.whole_state_dict(), stage.aliases


def test_three_layers_and_two_replicas(four_ranks):
    """Two of the copies are in one stage; gradients are added up over replicas, and then over copies."""
    expected, aliases = of_replicas(1, 1)
    assert aliases == {"2.weight": "0.weight", "4.weight": "0.weight"}
    for state, _ in four_ranks(of_replicas, 4, 2):
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=0, atol=1e-12), name


def test_the_same_model_can_be_cut_again():
    whole = model()
    weight = whole.head.weight
    for _ in range(2):
        with samestep.world() as world:
            plan = samestep.plan_pipeline(whole, batch(), loss, stages=1, micro_batches=2, schedule="1f1b", repeats=1)
            stage = samestep.pipeline(whole, world, plan)
            assert stage.aliases == {"tokens.weight": "head.weight"}
            assert list(stage.full_model.parameters) == ["head.weight", "hidden.weight", "hidden.bias"]
            assert whole.head.weight is weight
            steps(stage, 1, torch.optim.SGD(stage.parameters(), lr=0.1), clip=False)
            assert torch.equal(whole.head.weight, whole.tokens.weight)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_tied_model_can_be_planned_for_any_number_of_stages(stages):
    plan = samestep.plan_pipeline(model(), batch(), loss, stages=stages, micro_batches=2, schedule="1f1b", repeats=1)
    assert len(plan.ends) == stages


def half_frozen():
    with samestep.world(pipeline=2) as world:
        whole = model()
        plan = samestep.plan_pipeline(whole, batch(), loss, stages=2, micro_batches=2, schedule="1f1b", repeats=1)
        stage = samestep.pipeline(whole, world, plan)
        for name, each in stage.named_parameters():
            each.requires_grad_(name != "head.weight")
        with pytest.raises(ModelError) as said:
            stage.step(batch())
        return str(said.value)


def test_a_weight_that_is_frozen_under_one_of_its_names_is_named_on_all_ranks(two_ranks):
    """The unsplit model would train it under neither; one rank alone would go on stepping it."""
    told = "head.weight does not require grad and tokens.weight does, and they are one weight in several stages"
    for said in two_ranks(half_frozen):
        assert said.startswith(told)


def set_frozen(module, names, frozen):
    for name, each in module.named_parameters():
        each.requires_grad_(name not in names or not frozen)


def thawed(ranks):
    """Trains, freezes the tied weight, trains, and thaws it; two steps are added up for each of the optimizer."""
    with samestep.world(pipeline=ranks) as world:
        whole = model()
        plan = samestep.plan_pipeline(whole, batch(), loss, stages=ranks, micro_batches=4, schedule="1f1b", repeats=1)
        stage = samestep.pipeline(whole, world, plan)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
        for frozen in (False, True, False):
            set_frozen(stage, {"tokens.weight", "head.weight"}, frozen)
            steps(stage, 1, optimizer)
        return stage.whole_state_dict()


def test_a_weight_of_two_stages_can_be_frozen_and_thawed(two_ranks):
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for frozen in (False, True, False):
        set_frozen(whole, {"head.weight"}, frozen)
        for seed in (0, 50):
            loss(whole(batch(seed)[0]), batch(seed)[1]).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    alone = thawed(1)
    for state in two_ranks(thawed, 2):
        assert_same_bits(state, alone)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
