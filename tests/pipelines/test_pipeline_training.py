"""A pipeline in a loop over shards: the steps, losses and evaluations of one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.errors import DataError, StepError
from samestep.pipelines.pipeline import Pipeline
from samestep.testing import assert_same_bits

IGNORED = -100
SAMPLES = 37


def model(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double()


def dataset(padded=True):
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    if padded:
        y[torch.rand(SAMPLES, generator=generator) < 0.4] = IGNORED
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64), y)


def counted(batch):
    return (batch[1] != IGNORED).sum()


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def trained(make, options, epochs=2):
    """Losses of steps, norms, evaluations, and this rank's parameters, after some epochs."""
    with samestep.world(pipeline=options.pop("stages", 1), device="cpu") as world:
        stage = make(world)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9)
        batches = samestep.shards(dataset(), world, weight=counted, **options)
        found = {"losses": [], "norms": [], "scores": []}
        for _ in range(epochs):
            for batch in batches:
                stage.step(batch)
                if batches.step_ends:
                    found["norms"].append(float(samestep.clip_grad_norm_(stage, 0.3)))
                    optimizer.step()
                    optimizer.zero_grad()
                    batches.commit()
                    found["losses"].append(batches.loss)
            found["scores"].append(
                samestep.evaluate(
                    lambda batch: (stage(batch[0]), batch[1]),
                    dataset(),
                    world,
                    batch_size=10,
                    metrics={"accuracy": accuracy, "sum": lambda o, _: o.sum()},
                )
            )
        found["model"] = {name: each.detach().clone() for name, each in stage.named_parameters()}
        return found


def mean(outputs, targets):
    """The mean loss of what counts; 0 where nothing does."""
    return F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum") / counted((None, targets)).clamp(1)


class Whole(nn.Module):
    """One process, with whole batches, and nothing of a pipeline."""

    def __init__(self):
        super().__init__()
        self.inner = model()

    def step(self, batch):
        x, y = batch
        mean(self.inner(x), y).backward()

    def forward(self, x):
        return self.inner(x)

    def named_parameters(self, *_args, **_kwargs):
        return self.inner.named_parameters()


def whole_losses(batch_size, epochs=2):
    """The losses of the steps, computed beside them."""
    with samestep.world() as world:
        alone = Whole()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
        batches, found = samestep.shards(dataset(), world, batch_size=batch_size, weight=counted), []
        for _ in range(epochs):
            for x, y in batches:
                loss = mean(alone(x), y)
                loss.backward()
                samestep.clip_grad_norm_(alone, 0.3)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found, {name: each.detach().clone() for name, each in alone.named_parameters()}


def piped(ends, schedule, options, devices=None):

    def make(world):
        return Pipeline(model(), world, F.cross_entropy, ends=ends, schedule=schedule, devices=devices)

    return trained(make, options)


def check(results, batch_size):
    losses, parameters = whole_losses(batch_size)
    for found in results:
        assert found["losses"] == pytest.approx(losses, rel=1e-12)
        assert found["norms"] == results[0]["norms"]
        assert found["scores"] == results[0]["scores"]
        for name, each in found["model"].items():
            torch.testing.assert_close(each, parameters[name], rtol=1e-11, atol=1e-13)
    assert {name for found in results for name in found["model"]} == parameters.keys()


def test_two_stages_train_as_one_process_does(two_ranks):
    """And are scored as it is."""
    results = two_ranks(piped, (3, 6), "1f1b", {"stages": 2, "batch_size": 9})
    check(results, 9)
    alone = trained(lambda _: Whole(), {"batch_size": 9})
    for found in results:
        for score, expected in zip(found["scores"], alone["scores"], strict=True):
            assert float(score["accuracy"]) == float(expected["accuracy"])
            assert float(score["sum"]) == pytest.approx(float(expected["sum"]), rel=1e-11)


def test_so_do_stages_of_one_process_that_interleave_and_take_several_micro_batches():
    options = {"batch_size": 9, "micro_batch_size": 4}
    found = piped((1, 3, 4, 6), "interleaved", options, devices=["cpu", "cpu"])
    check([found], 9)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"batch_size": 12}, marks=pytest.mark.prove), {"batch_size": 12, "micro_batch_size": 3}],
)
def test_two_replicas_of_two_stages_do_and_one_may_have_no_sample_left(four_ranks, options):
    assert SAMPLES % 12 == 1
    check(four_ranks(piped, (2, 6), "zero-bubble", {"stages": 2, **options}), 12)


def evaluated():
    with samestep.world(pipeline=2) as world:
        stage = Pipeline(model(dropout=0.5), world, F.cross_entropy, ends=[3, 6])
        x = dataset().tensors[0]

        def outputs():
            return samestep.evaluate(
                lambda batch: (stage(batch[0]), batch[1]), dataset(), world, batch_size=9, metrics={"o": lambda o, _: o}
            )["o"]

        first, second, modes = outputs(), outputs(), {module.training for module in stage.modules()}
        stage.eval()
        return first, second, modes, stage(x), {each.grad for each in stage.parameters()}


def test_an_evaluation_draws_nothing_and_leaves_modes_and_gradients_alone(two_ranks):
    alone = model(dropout=0.5).eval()
    x = dataset().tensors[0]
    for first, second, modes, all_at_once, gradients in two_ranks(evaluated):
        assert torch.equal(first, second)
        assert modes == {True}
        assert gradients == {None}
        torch.testing.assert_close(first, alone(x), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(all_at_once, alone(x), rtol=1e-12, atol=1e-14)


def clipped_too_early():
    with samestep.world(pipeline=2) as world:
        stage = Pipeline(model(), world, F.cross_entropy, ends=[3, 6])
        batches = iter(samestep.shards(dataset(), world, batch_size=8, micro_batch_size=4))
        stage.step(next(batches))
        with pytest.raises(StepError, match="does not end the step"):
            samestep.clip_grad_norm_(stage, 1.0)


def test_clipping_within_a_step_is_refused(two_ranks):
    two_ranks(clipped_too_early)


def abandoned():
    """A step that is left after its first micro-batch, and the step after it."""
    with samestep.world(pipeline=2) as world:
        stage = Pipeline(model(), world, F.cross_entropy, ends=[3, 6])
        batches = samestep.shards(dataset(padded=False), world, batch_size=8, micro_batch_size=2, shuffle=False)
        found = []
        for leave in (True, False):
            for batch in batches:
                stage.step(batch)
                if leave or batches.step_ends:
                    break
            found.append({name: each.grad.clone() for name, each in stage.named_parameters()})
            stage.zero_grad()
        return found


def test_a_step_that_was_abandoned_leaves_nothing_to_the_next(four_ranks):
    alone = model()
    x, y = (each[:8] for each in dataset(padded=False).tensors)
    F.cross_entropy(alone(x), y).backward()
    expected = {name: each.grad for name, each in alone.named_parameters()}
    for _, gradients in four_ranks(abandoned):
        for name, each in gradients.items():
            torch.testing.assert_close(each, expected[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("batch", [torch.ones(3, 6), {"x": torch.ones(3, 6)}, (torch.ones(3, 6),)])
def test_a_batch_without_targets_is_refused(batch):
    with samestep.world() as world, pytest.raises(DataError, match="it takes inputs and targets, in a tuple or list"):
        Pipeline(model(), world, F.cross_entropy, ends=[6]).step(batch)


def drawn(ends, schedule, ranks=1):
    """Gradients of two steps with dropout, and whether the stream of the process stands where it stood."""
    devices = ["cpu", "cpu"] if ranks == 1 and len(ends) > 1 else None
    with samestep.world(pipeline=ranks, device="cpu") as world:
        stage = Pipeline(model(dropout=0.5), world, F.cross_entropy, ends=ends, schedule=schedule, devices=devices)
        x, y = dataset(padded=False).tensors
        before, found = torch.get_rng_state(), []
        for _ in range(2):
            stage.zero_grad()
            stage.step((x, y))
            found.append({name: each.grad.clone() for name, each in stage.named_parameters()})
        assert torch.equal(torch.get_rng_state(), before)
        return found


def test_dropout_is_that_of_one_stage_wherever_the_model_is_cut(two_ranks):
    alone = drawn((6,), "1f1b")
    assert any(not torch.equal(alone[0][name], alone[1][name]) for name in alone[0])  # a step has masks of its own
    found = [drawn((1, 6), "fill-drain"), drawn((4, 6), "zero-bubble"), drawn((1, 2, 5, 6), "interleaved")]
    for results in [*found, *two_ranks(drawn, (4, 6), "zero-bubble", 2)]:
        for own, expected in zip(results, alone, strict=True):
            assert_same_bits(own, {name: expected[name] for name in own})


def replicas_draws():
    with samestep.world(pipeline=2) as world:
        stage = Pipeline(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), world, lambda o, _: o.sum(), ends=[1, 2])
        outputs = []
        for module in stage.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda *given: outputs.append(given[-1]))
        stage.step((torch.ones(8, 6), torch.ones(8)))
        return [each.detach() == 0 for each in outputs]


def test_micro_batches_and_replicas_draw_masks_of_their_own(four_ranks):
    masks = [mask for found in four_ranks(replicas_draws) for mask in found]
    assert len(masks) == 8
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def interrupted():
    """A step that fails on both replicas behind another, and one that is taken after it."""
    with samestep.world() as world:
        failing = [False, True, False]

        def lose(outputs, targets):
            if failing[0]:
                raise ValueError("no loss")
            return F.cross_entropy(outputs, targets)

        stage = Pipeline(model(), world, lose, ends=[6])
        x, y = (each[: 8 + world.rank] for each in dataset(padded=False).tensors)
        found = []
        while failing:
            try:
                stage.step((x, y))
                found.append({name: each.grad.clone() for name, each in stage.named_parameters()})
            except ValueError:
                stage.zero_grad()
            failing.pop(0)
        return found


def test_a_step_that_failed_leaves_nothing_to_the_next(two_ranks):
    for first, second in two_ranks(interrupted):
        assert_same_bits(second, first)
