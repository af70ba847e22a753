"""Ranks that step by themselves: alike after every average, as computed in one process, evaluated and saved as one."""

import copy
import warnings

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import UsageError
from samestep.replicas.local_sgd import average

pytestmark = pytest.mark.usefixtures("one_thread")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def inputs(rank, step):
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * rank + step))


def train(model, optimizer, rank, step):
    model(inputs(rank, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def by_ranks(steps, every):
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, average_every=every)
        optimizer, found = optimizer_of(model), []
        for step in range(steps):
            train(model, optimizer, world.rank, step)
            found.append(bits(model))
        model.average()
        return found, bits(model)


def by_one(ranks, steps, every):
    """The parameters of all ranks after each step, computed in this process."""
    models = [network() for _ in range(ranks)]
    optimizers = [optimizer_of(model) for model in models]
    found = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, rank, step)
        if (step + 1) % every == 0:
            mean_into(models)
        found.append([bits(model) for model in models])
    if steps % every:
        mean_into(models)
    return found, bits(models[0])


def mean_into(models):
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            total = torch.zeros_like(parameters[0], dtype=torch.float64)
            for parameter in parameters:
                total += parameter
            for parameter in parameters:
                parameter.copy_(total / len(models))


@pytest.mark.parametrize("every", [1, 3])
def test_ranks_take_the_steps_that_one_process_computes_for_them(three_ranks, every):
    alone, end = by_one(3, 8, every)
    found = three_ranks(by_ranks, 8, every)
    for rank, (steps, last) in enumerate(found):
        assert all(same(mine, parts[rank]) for mine, parts in zip(steps, alone, strict=True))
        assert same(last, end)
    if every > 1:
        assert not same(found[0][0][0], found[1][0][0])  # between averages they differ


def evaluated(every):
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, average_every=every)
        optimizer = optimizer_of(model)
        for step in range(5):
            train(model, optimizer, world.rank, step)
        data = torch.utils.data.TensorDataset(inputs(9, 9), inputs(8, 8))
        metrics = {"mean": lambda outputs, _: float(outputs.double().mean())}
        found = samestep.evaluate(lambda batch: (model(batch[0]), batch[1]), data, world, batch_size=4, metrics=metrics)
        return found["mean"], bits(model)


def test_what_is_evaluated_is_the_mean(two_ranks):
    _, end = by_one(2, 5, 100)
    model = network()
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), end, strict=True):
            parameter.copy_(mean)
    expected = float(model(inputs(9, 9)).detach().double().mean())
    for found, parameters in two_ranks(evaluated, 100):
        assert same(parameters, end)
        assert found == pytest.approx(expected, abs=1e-7)


def resumed(folder, steps, cut):
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, average_every=4)
        optimizer = optimizer_of(model)
        state = samestep.checkpoint(folder, world, every=cut, model=model, optimizer=optimizer)
        for step in range(state.step, steps):
            train(model, optimizer, world.rank, step)
            state.commit()
        state.wait()
        model.average()
        return bool(state.resumed), bits(model), [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]


def test_a_save_averages_optimizer_state_too_and_a_resumed_run_is_the_one_that_went_on(two_ranks, tmp_path):
    straight = two_ranks(resumed, tmp_path / "straight", 9, 3)
    two_ranks(resumed, tmp_path / "cut", 6, 3)
    again = two_ranks(resumed, tmp_path / "cut", 9, 3)
    assert [was for was, _, _ in again] == [True, True]
    assert same(again[0][1], straight[0][1])
    assert same(again[0][2], straight[0][2])
    assert same(again[0][2], again[1][2])


def parted():
    with samestep.world() as world:
        model = samestep.replicate(network(), world, average_every=10)
        train(model, optimizer_of(model), world.rank, 0)
        if world.rank == 1:
            return True
        with pytest.warns(
            UserWarning, match="1 steps after the last average, and every rank keeps parameters of its own"
        ):
            world.close()
        return True


def test_ranks_that_part_unaveraged_are_told(two_ranks):
    assert two_ranks(parted) == [True, True]


def failing():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with samestep.world() as world:
                model = samestep.replicate(network(), world, average_every=10)
                train(model, optimizer_of(model), world.rank, 0)
                raise ValueError
        except ValueError:
            pass
    return [str(one.message) for one in said]


def test_after_an_exception_nothing_is_said_of_averages(two_ranks):
    assert two_ranks(failing) == [[], []]


def of_two_optimizers():
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, average_every=2)
        optimizers = [torch.optim.SGD(model.module[layer].parameters(), lr=0.1) for layer in (0, 2)]
        for step in range(2):
            model(inputs(world.rank, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        model.average()
        return bits(model)


def test_what_a_second_optimizer_did_behind_an_average_is_averaged_at_the_end(two_ranks):
    mine, other = two_ranks(of_two_optimizers)
    assert same(mine, other)


def averaged(dtype):
    with samestep.world() as world:
        generator = torch.Generator().manual_seed(world.rank)
        mine = [torch.randn(7, 3, generator=generator).to(dtype), torch.full((5,), 0.1, dtype=dtype)]
        brought = copy.deepcopy(mine)
        average([*mine, torch.empty(0, dtype=dtype)], world.data)
        return brought, mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_is_rounded_once_and_of_equal_floats_is_that_float(three_ranks, dtype):
    found = three_ranks(averaged, dtype)
    total = torch.zeros(7, 3, dtype=torch.float64)
    for brought, _ in found:
        total += brought[0]
    for brought, mine in found:
        assert torch.equal(mine[0], (total / 3).to(dtype))
        assert torch.equal(mine[1], brought[1]) or dtype == torch.float64  # 3 · 0.1 is rounded there


def averaged_complex():
    with samestep.world() as world:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.full((3,), 1 + 2j) * (world.rank + 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        replica = samestep.replicate(model, world, average_every=2)  # sends all the first rank's
        model.weight.grad = torch.full((3,), (world.rank + 1) * (4 - 2j))
        optimizer.step()
        replica.average()
        return model.weight.detach(), optimizer.state[model.weight]["momentum_buffer"]


def test_complex_parameters_and_their_momentum_have_a_mean(three_ranks):
    for weight, momentum in three_ranks(averaged_complex):
        assert torch.equal(momentum, torch.full((3,), 8 - 4j))
        assert torch.equal(weight, torch.full((3,), 1 + 2j - 0.5 * (8 - 4j)))


def skipping():
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, average_every=3, nonfinite="skip")
        optimizer = optimizer_of(model)
        for step in range(6):
            x = inputs(world.rank, step)
            if step == 1 and world.rank == 1:
                x[0, 0] = float("nan")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.nonfinite.skipped, bits(model)


def test_a_rank_leaves_its_own_bad_step_out_and_all_average_at_the_same_steps(two_ranks):
    (none, mine), (one, other) = two_ranks(skipping)
    assert (none, one) == (0, 1)
    assert same(mine, other)
    assert all(bool(each.isfinite().all()) for each in mine)


def wrongly(settings):
    with samestep.world() as world:
        try:
            samestep.replicate(network(), world, **settings)
        except UsageError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"average_every": 0}, "average_every=0 is no number of steps"),
        ({"average_every": 2.5}, "average_every=2.5 is no number"),
        ({"average_every": 4, "compress": "int8"}, "compress is about gradients: leave one of them out"),
    ],
)
def test_what_makes_no_sense_is_refused(two_ranks, settings, said):
    for found in two_ranks(wrongly, settings):
        assert said in found


def test_optimizer_state_is_averaged_where_parameters_have_just_been(two_ranks, tmp_path):
    """The save falls on a step that averages: parameters are alike then, and momentum is not."""
    mine, other = two_ranks(resumed, tmp_path / "straight", 8, 4)
    assert same(mine[1], other[1])
    assert same(mine[2], other[2])
