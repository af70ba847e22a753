"""A model in stages takes the step of one process: on one replica its bits, on several its numbers."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import DataError, ModelError, UsageError
from samestep.pipelines import gradient_sync
from samestep.pipelines.chain_layer import sequential
from samestep.pipelines.model_chain import build_chain, shared_layers
from samestep.pipelines.pipeline import Pipeline
from samestep.testing import assert_same_bits
from samestep.topology import cut_evenly

IGNORED = -100
BATCHES = (13, 8, 3, 2)  # samples of a replica's batches: uneven, and fewer than micro-batches


def model(dtype=torch.float32):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.LayerNorm(12))
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), inner, nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


def batch(step, replica, dtype=torch.float32, padded=False):
    generator = torch.Generator().manual_seed(10 * step + replica)
    count = BATCHES[step] - replica
    x = torch.randn(count, 6, generator=generator, dtype=dtype)
    y = torch.randint(0, 4, (count,), generator=generator)
    if padded:
        y[torch.rand(count, generator=generator) < 0.4] = IGNORED
        y[0] = 1
    return x, y


def counted(targets):
    return (targets != IGNORED).sum()


def piped(ends, schedule, stages, dtype, padded, steps, devices=None):
    options = {"ends": ends, "schedule": schedule, "weight": counted if padded else None, "devices": devices}
    with samestep.world(pipeline=stages, device="cpu") as world:
        pipeline = Pipeline(model(dtype), world, F.cross_entropy, **options)
        found = []
        for step in range(steps):
            pipeline.zero_grad()
            loss = pipeline.step(batch(step, world.data.rank, dtype, padded))
            found.append((float(loss), {name: each.grad.clone() for name, each in pipeline.named_parameters()}))
        return found, {name: each for part in pipeline.parts.values() for name, each in part.state_dict().items()}


def one_after_another(steps):
    """One process that takes the micro-batches of one replica, in their order."""
    alone, found = model(), []
    for step in range(steps):
        alone.zero_grad()
        x, y = batch(step, 0)
        total = torch.zeros(1, dtype=torch.float64)
        for begin, end in cut_evenly(len(x), min(4, len(x))):
            loss = F.cross_entropy(alone(x[begin:end]), y[begin:end]) * (float(end - begin) / float(len(x)))
            loss.backward()
            total += loss.detach().double()
        found.append((float(total), {name: each.grad.clone() for name, each in alone.named_parameters()}))
    return found


def at_once(steps, replicas, padded):
    """One process that takes the whole batch, in float64."""
    alone, found = model(torch.float64), []
    for step in range(steps):
        alone.zero_grad()
        parts = [batch(step, replica, torch.float64, padded) for replica in range(replicas)]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        loss = F.cross_entropy(alone(x), y, ignore_index=IGNORED)
        loss.backward()
        found.append((loss.item(), {name: each.grad.clone() for name, each in alone.named_parameters()}))
    return found


def check_bits(results):
    for step, (loss, gradients) in enumerate(one_after_another(len(BATCHES))):
        assert [found[step][0] for found, _ in results] == [loss] * len(results)
        merged = {name: each for found, _ in results for name, each in found[step][1].items()}
        assert set(merged) == set(gradients)
        assert_same_bits(merged, {name: gradients[name] for name in merged})


@pytest.mark.parametrize(
    ("ends", "schedule"),
    [((3, 8), "fill-drain"), ((5, 8), "1f1b"), ((1, 8), "zero-bubble"), ((2, 4, 6, 8), "interleaved")],
)
def test_stages_of_one_process_have_its_bits(ends, schedule):
    found = piped(ends, schedule, 1, torch.float32, False, len(BATCHES), ["cpu", "cpu"])
    check_bits([found])


def test_one_replica_has_the_bits_of_one_process(two_ranks):
    results = two_ranks(piped, (1, 8), "zero-bubble", 2, torch.float32, False, len(BATCHES))
    check_bits(results)
    states = [state for _, state in results]
    assert not states[0].keys() & states[1].keys()
    assert_same_bits(states[0] | states[1], dict(model().state_dict()))


NORMS = 2.0, float("inf")


def clipped(ends, schedule):
    with samestep.world(pipeline=2) as world:
        pipeline, found = Pipeline(model(), world, F.cross_entropy, ends=ends, schedule=schedule), {}
        for norm_type in NORMS:
            pipeline.zero_grad()
            pipeline.step(batch(0, 0))
            norm = samestep.clip_grad_norm_(pipeline, 0.1, norm_type)
            found[norm_type] = float(norm), {name: each.grad.clone() for name, each in pipeline.named_parameters()}
        return found


@pytest.mark.parametrize(("ends", "schedule"), [((4, 8), "1f1b"), ((2, 4, 6, 8), "interleaved")])
def test_clipping_is_by_the_norm_of_the_whole_model(two_ranks, ends, schedule):
    results = two_ranks(clipped, ends, schedule)
    ((_, gradients),) = one_after_another(1)
    for norm_type in NORMS:
        alone = model()
        for name, parameter in alone.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = samestep.clip_grad_norm_(alone, 0.1, norm_type)
        expected = {name: each.grad for name, each in alone.named_parameters()}
        for found, own in (result[norm_type] for result in results):
            assert found == float(norm)
            assert_same_bits(own, {name: expected[name] for name in own})


def check_numbers(results, expected):
    for step, (loss, gradients) in enumerate(expected):
        for found, _ in results:
            assert found[step][0] == pytest.approx(loss, rel=1e-12)
            for name, gradient in found[step][1].items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-14)
    assert {name for found, _ in results for name in found[0][1]} == set(expected[0][1])


def test_two_replicas_of_two_stages_take_the_step_of_one_process(four_ranks):
    """Replicas with different numbers of samples, and of items that count among them."""
    results = four_ranks(piped, (4, 8), "1f1b", 2, torch.float64, True, 3)
    check_numbers(results, at_once(3, 2, padded=True))


def accumulated():
    with samestep.world(pipeline=2) as world:
        pipeline = Pipeline(model(torch.float64), world, F.cross_entropy, ends=(4, 8))
        for step in range(3):
            pipeline.step(batch(step, world.data.rank, torch.float64))
        return {name: each.grad.clone() for name, each in pipeline.named_parameters()}


def test_steps_add_up_until_the_gradients_are_set_to_nothing(four_ranks):
    expected = at_once(3, 2, padded=False)
    for gradients in four_ranks(accumulated):
        for name, gradient in gradients.items():
            sum_ = sum(each[name] for _, each in expected)
            torch.testing.assert_close(gradient, sum_, rtol=1e-12, atol=1e-14)


def test_padding_in_micro_batches_changes_nothing():
    found = piped((4, 8), "fill-drain", 1, torch.float64, True, 3, ["cpu", "cpu"])
    check_numbers([found], at_once(3, 1, padded=True))


# --- chains ----------------------------------------------------------------------------------


def test_layers_have_the_names_of_the_model():
    assert [layer.name for layer in build_chain(model()).layers] == ["0", "1", "2.0", "2.1", "2.2", "3", "4", "5"]


def test_a_part_computes_what_its_layers_do_in_the_model():
    whole = model()
    chain = build_chain(whole)
    x = torch.randn(3, 6)
    for cut in range(1, 8):
        (first, calls), (second, more) = chain.extract_stage(0, cut), chain.extract_stage(cut, 8)
        assert torch.equal(sequential([*calls, *more])(x), whole(x))
        assert list((first.state_dict() | second.state_dict()).keys()) == list(whole.state_dict())


class Branching(nn.Module):
    def forward(self, x):
        return x


def twice():
    made = model()
    made[3] = nn.Linear(12, 8)
    made.append(nn.Linear(4, 8))
    made.append(made[5])
    return made


def test_a_module_that_comes_twice_is_two_layers():
    whole = twice()
    x = torch.randn(3, 6)
    with samestep.world() as world:
        stage = Pipeline(whole, world, F.cross_entropy, ends=[10], micro_batches=1)
        assert torch.equal(stage(x), whole(x))


def test_layers_that_share_a_weight_are_found():
    assert shared_layers(build_chain(twice()).layers) == [frozenset({7, 9})]
    assert shared_layers(build_chain(model()).layers) == []


@pytest.mark.parametrize(
    ("make", "ends", "error", "said"),
    [
        (Branching, [1], ModelError, "Branching is no nn.Sequential: samestep.plan_pipeline cuts it"),
        (lambda: model().append(nn.BatchNorm1d(4)), [4, 9], ModelError, "layer 6 has a BatchNorm1d, whose statistics"),
        (twice, [8, 10], ModelError, "layers 5 and 7 share a weight, and are in different stages"),
        (model, [4, 7], UsageError, r"ends=\[4, 7\] do not cut 8 layers into stages"),
        (model, [4, 4, 8], UsageError, r"ends=\[4, 4, 8\] do not cut 8 layers"),
        (model, [], UsageError, r"ends=\[\] do not cut 8 layers"),
    ],
)
def test_what_cannot_be_cut_so_is_refused(make, ends, error, said):
    with samestep.world() as world, pytest.raises(error, match=said):
        Pipeline(make(), world, F.cross_entropy, ends=ends)


def uneven():
    with samestep.world(pipeline=int(os.environ["WORLD_SIZE"])) as world:
        try:
            Pipeline(model(), world, F.cross_entropy, ends=[2, 4, 8])
        except UsageError as error:
            return str(error)


def test_stages_that_cannot_be_dealt_evenly_are_refused(two_ranks):
    assert two_ranks(uneven) == ["3 stages cannot be divided evenly among 2 ranks: give a multiple of 2"] * 2


def planned_for(stages):
    with samestep.world(pipeline=2) as world:
        plan = samestep.plan_pipeline(
            model(), batch(0, 0), F.cross_entropy, stages=stages, schedule="1f1b", micro_batches=2, repeats=1
        )
        with pytest.raises(UsageError, match=r"3 stages, and the pipeline 2 ranks: .*\(pipeline=3\), or .* stages=2"):
            samestep.pipeline(model(), world, plan)


def test_a_plan_for_another_number_of_stages_is_refused(two_ranks):
    two_ranks(planned_for, 3)


def planned():
    """Each rank measures for itself, so their plans may differ."""
    with samestep.world(pipeline=2) as world:
        whole = model()
        plan = samestep.plan_pipeline(whole, batch(0, 0), F.cross_entropy, repeats=1 + world.rank)
        stage = samestep.pipeline(whole, world, plan)
        return float(stage.step(batch(0, 0))), list(dict(stage.named_parameters()))


def test_all_ranks_take_the_plan_of_the_first(two_ranks):
    (first, own), (second, others) = two_ranks(planned)
    assert first == second
    assert own + others == list(dict(model().named_parameters()))


def test_one_process_takes_a_plan_for_several(two_ranks):
    whole = model()
    with samestep.world(pipeline=2) as world:
        plan = samestep.plan_pipeline(whole, batch(0, 0), F.cross_entropy, micro_batches=4, repeats=1)
        stage = samestep.pipeline(whole, world, plan)
        loss = float(stage.step(batch(0, 0)))
    assert [found[0][0] for found, _ in two_ranks(piped, (3, 8), "1f1b", 2, torch.float32, False, 1)] == [loss] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.ones(3, 6), torch.ones(4)), "the tensors of a batch have 3 and 4 samples: dim 0 must agree"),
        ((torch.ones(0, 6), torch.ones(0)), "the batch has no sample"),
    ],
)
def test_batches_that_make_no_sense_are_refused(given, said):
    with samestep.world() as world, pytest.raises(DataError, match=said):
        Pipeline(model(), world, F.cross_entropy, ends=[8]).step(given)


def test_alone_it_is_the_model_in_micro_batches():
    with samestep.world() as world:
        pipeline = Pipeline(copy.deepcopy(model()), world, F.cross_entropy, ends=[8])
        loss = pipeline.step(batch(0, 0))
    ((expected, gradients),) = one_after_another(1)
    torch.testing.assert_close(float(loss), expected)
    for name, each in pipeline.named_parameters():
        torch.testing.assert_close(each.grad, gradients[name])


def added_up(is_shared):
    """State after three steps, in the second of which biases are not trained."""
    with pytest.MonkeyPatch.context() as patch, samestep.world(pipeline=2) as world:
        if not is_shared:
            patch.setattr(gradient_sync, "has_total_store_order", lambda: False)
        stage = Pipeline(model(), world, F.cross_entropy, ends=[4, 8])
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        for step in range(3):
            for each in stage.parameters():
                each.requires_grad_(step != 1 or each.dim() > 1)
            stage.step(batch(step, world.data.rank))
            optimizer.step()
            optimizer.zero_grad()
        return stage._gradient_sync._shared_memory is not None, stage.whole_state_dict()


def test_replicas_of_one_host_add_up_in_shared_memory(four_ranks):
    """The sum of two is the same in any order, so that of gloo has its bits."""
    shared, gloo = four_ranks(added_up, True), four_ranks(added_up, False)
    assert [each for each, _ in shared] == [True] * 4
    assert [each for each, _ in gloo] == [False] * 4
    for (_, state), (_, other) in zip(shared, gloo, strict=True):
        assert_same_bits(state, other)
