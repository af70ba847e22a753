"""Buckets are found while the training runs, and the training is the same."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.errors import UsageError
from samestep.replicas import bucket_tuner
from samestep.testing import assert_same_bits

WHOLE = 80  # steps; a decision takes 69
STEPS = 40  # with as few backwards of each kind as `decided` has measured it takes 26


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5))


def inputs(rank, step):
    return torch.randn(6, 20, generator=torch.Generator().manual_seed(1000 * rank + step))


@contextlib.contextmanager
def decided(takes=True, cut=None, lists=True):
    """Has buckets proposed that are not the default's, whatever was measured, and taken or not."""
    names = ("optimal_layout", "is_faster", "WORTH_TRYING", "_HAS_LISTS", "best_single_size", "PROFILED", "BLOCK")
    before = {name: getattr(bucket_tuner, name) for name in names}
    bucket_tuner.optimal_layout = lambda backward: cut or tuple(range(1, len(backward.sizes) + 1))
    bucket_tuner.best_single_size = lambda backward, *, from_the_end: 2000
    bucket_tuner.is_faster = lambda ratios: (takes, f"{len(ratios)} ratios")
    bucket_tuner.WORTH_TRYING = float("inf")
    bucket_tuner.PROFILED = 2
    bucket_tuner.BLOCK = 1
    bucket_tuner._HAS_LISTS = lists
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(bucket_tuner, name, value)


def steps(model, world, number=STEPS):
    """Trains, and returns what every step's gradients were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(number):
        model(inputs(world.rank, step)).square().mean().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone())
        optimizer.step()
        optimizer.zero_grad()
    return found


def engine_of(model):
    return model.__dict__["_engine"].engine


def real_buckets(model):
    told = engine_of(model)._get_ddp_logging_data()
    return tuple(map(int, told["rebuilt_bucket_sizes"].split(", ")))


def trained(buckets, reduce, takes):
    with samestep.world() as world, decided(takes):
        model = samestep.replicate(network(), world, buckets=buckets, reduce=reduce)
        return steps(model, world), model.buckets and model.buckets.takes_proposed


@pytest.mark.parametrize(
    ("reduce", "takes"),
    [
        *((reduce, True) for reduce in (None, "gloo", "ordered")),
        ("gloo", False),
        pytest.param(None, False, marks=pytest.mark.prove),
        pytest.param("ordered", False, marks=pytest.mark.prove),
    ],
)
def test_every_gradient_has_the_same_bits_as_without(two_ranks, reduce, takes):
    expected, _ = two_ranks(trained, None, reduce, takes)[0]
    for found, taken in two_ranks(trained, "auto", reduce, takes):
        assert taken is takes
        assert_same_bits(found, expected)


def test_of_three_ranks_too_where_they_add_in_order(three_ranks):
    expected, _ = three_ranks(trained, None, None, True)[0]
    for found, taken in three_ranks(trained, "auto", None, True):
        assert taken is True
        assert_same_bits(found, expected)


def planned(takes, lists, find_unused_parameters):
    with samestep.world() as world, decided(takes, lists=lists):
        model = samestep.replicate(
            network(), world, buckets="auto", reduce="gloo", find_unused_parameters=find_unused_parameters
        )
        before = model.buckets
        steps(model, world)
        found = real_buckets(model) if not find_unused_parameters else initial_buckets(model)
        return before, model.buckets, found


def initial_buckets(model):
    told = engine_of(model)._get_ddp_logging_data()
    return tuple(map(int, told["bucket_sizes"].split(", ")))


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("lists", [True, False])
def test_all_ranks_have_one_plan_and_torch_has_its_buckets(two_ranks, lists, find_unused_parameters):
    (before, plan, real), (_, other, also_real) = two_ranks(planned, True, lists, find_unused_parameters)
    assert before is None
    assert plan == other
    assert real == also_real == plan.chosen.buckets == plan.proposed.buckets
    assert len(real) > 1
    assert plan.proposed.achieved_s > 0
    assert plan.reason == "4 ratios"


def test_where_the_default_is_kept_torch_has_its_own_buckets(two_ranks):
    for _, plan, real in two_ranks(planned, False, True, False):
        assert real == plan.chosen.buckets == plan.default.buckets
        assert len(real) == 1


def really_decided():
    with samestep.world() as world:
        model = samestep.replicate(network(), world, buckets="auto")
        steps(model, world, WHOLE)
        plan = model.buckets
    return plan, model.buckets, str(plan)


def test_what_is_found_out_is_shown_and_outlives_the_world(two_ranks):
    (plan, later, shown), (other, _, _) = two_ranks(really_decided)
    assert plan == later == other
    assert plan.beside is False
    assert plan.default.achieved_s > 0
    assert shown.splitlines()[1].startswith("default")


def hooks(number, *, inside=True):
    with samestep.world() as world:
        model = samestep.replicate(network(), world, buckets="auto", nonfinite="off")
        steps(model, world, number)
        if inside:
            return [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
    return [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]


def closed_early(number):
    return hooks(number, inside=False)


def test_nothing_is_left_on_the_parameters_afterwards(two_ranks):
    assert two_ranks(hooks, 3) == [[1] * 6] * 2
    assert two_ranks(hooks, WHOLE) == [[0] * 6] * 2


def test_nor_where_the_world_ends_before_a_decision(two_ranks):
    assert two_ranks(closed_early, 5) == [[0] * 6] * 2


def accumulated(buckets):
    with samestep.world() as world, decided():
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(12 * STEPS, 20, generator=draw))
        model = samestep.replicate(network(), world, buckets=buckets)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for (x,) in (batches := samestep.shards(data, world, batch_size=12, micro_batch_size=2)):
            batches.mean(model(x).square().mean(1)).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
        return dict(model.state_dict()), model.buckets is not None


def test_gradient_accumulation_keeps_its_bits(two_ranks):
    expected, _ = two_ranks(accumulated, None)[0]
    for state, is_decided in two_ranks(accumulated, "auto"):
        assert is_decided
        assert_same_bits(state, expected)


def two_forwards(buckets, joint):
    """Two forwards a step, with a backward each after both, or one of both."""
    with samestep.world() as world, decided():
        model = samestep.replicate(network(), world, buckets=buckets)
        found = []
        for step in range(STEPS):
            losses = [model(inputs(world.rank, 2 * step + at)).square().mean() for at in range(2)]
            for loss in [losses[0] + losses[1]] if joint else losses:
                loss.backward()
            found.append(model.module[0].weight.grad.clone())
            model.zero_grad()
        return found, model.buckets is not None


@pytest.mark.parametrize("joint", [True, False])
def test_two_forwards_before_a_backward_keep_their_bits(two_ranks, joint):
    expected, _ = two_ranks(two_forwards, None, joint)[0]
    for found, is_decided in two_ranks(two_forwards, "auto", joint):
        assert is_decided
        assert_same_bits(found, expected)


def ahead(buckets):
    """The next forward always comes before the last one's backward: there is no moment for a change."""
    with samestep.world() as world, decided():
        model = samestep.replicate(network(), world, buckets=buckets)
        waiting = model(inputs(world.rank, 0)).square().mean()
        for step in range(1, STEPS):
            following = model(inputs(world.rank, step)).square().mean()
            waiting.backward()
            waiting = following
        return model.module[0].weight.grad, model.buckets


def test_where_a_forward_always_waits_nothing_is_changed(two_ranks):
    expected = two_ranks(ahead, None)[0][0]
    for found, plan in two_ranks(ahead, "auto"):
        assert plan is None
        assert_same_bits(found, expected)


def frozen():
    with samestep.world() as world, decided():
        model = samestep.replicate(network(), world, buckets="auto", nonfinite="off")
        plans = []
        for frozen in (False, True):
            model.module[0].requires_grad_(not frozen)
            for step in range(STEPS):
                model(inputs(world.rank, step)).square().mean().backward()
                model.zero_grad()
                if step == 0:
                    plans.append(model.buckets)
            plans.append(model.buckets)
        return plans, len(model.module[0].weight._post_accumulate_grad_hooks or ())


def test_other_trained_parameters_are_measured_anew(two_ranks):
    for (none, first, none_again, second), left in two_ranks(frozen):
        assert none is None
        assert none_again is None
        assert [len(plan.proposed.buckets) for plan in (first, second)] == [
            5,
            3,
        ]  # the last layer's bias is too small for a bucket of its own
        assert left == 0


def refused_or_kept(model):
    with samestep.world() as world, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = samestep.replicate(model, world, buckets="auto")
        model(torch.ones(1, 2)).sum().backward()
        return [str(one.message) for one in said], model.buckets


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double()), "several dtypes"),
        (nn.Linear(2, 1, bias=False), "a single tensor"),
    ],
    ids=["dtypes", "single"],
)
def test_a_model_that_offers_no_choice_is_told_once_and_trains(two_ranks, model, reason):
    if reason == "several dtypes":
        model[0].register_forward_hook(to_double)
    (said, plan), (nothing, _) = two_ranks(refused_or_kept, model)
    assert plan is None
    assert nothing == []
    assert len(said) == 1
    assert reason in said[0]


def to_double(module, inputs, output):
    return output.double()


def test_sparse_gradients_have_no_choice():
    embedding = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    assert "sparse" in bucket_tuner.reason_not_tunable(embedding)
    assert bucket_tuner.reason_not_tunable(network()) is None


@pytest.mark.parametrize("virtual_ranks", [None, 2])
def test_alone_and_on_virtual_ranks_there_is_nothing_to_choose(virtual_ranks):
    with samestep.world(virtual_ranks=virtual_ranks) as world:
        model = samestep.replicate(network(), world, buckets="auto")
        data = TensorDataset(torch.ones(16, 20))
        for (x,) in (batches := samestep.shards(data, world, batch_size=4)):
            batches.mean(model(x).square().mean(1)).backward()
        assert model.buckets is None


@pytest.mark.parametrize("buckets", [0, -1, float("nan"), float("inf"), True, "25", "fast", [1, 25]])
def test_what_is_no_bucket_size_is_refused(buckets):
    with samestep.world() as world, pytest.raises(UsageError, match="give MiB above 0, such as 25, or 'auto'"):
        samestep.replicate(network(), world, buckets=buckets)


def test_before_torch_2_13_one_cap_serves_all_buckets(monkeypatch):
    assert bucket_tuner.ddp_argument((1 << 20, 3 << 19)) == {"bucket_cap_mb_list": [1.0, 1.5]}
    monkeypatch.setattr(bucket_tuner, "_HAS_LISTS", False)
    assert bucket_tuner.ddp_argument((3 << 19,)) == {"bucket_cap_mb": 1.5}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_on_a_gpu_moments_are_those_of_its_work_not_of_its_orders():
    device = torch.device("cuda", 0)
    matrix = torch.ones(4096, 4096, device=device)
    begin = bucket_tuner.timestamp(device)
    for _ in range(20):
        matrix = matrix @ matrix / 4096
    end = bucket_tuner.timestamp(device)
    # 20 products of 4096^3 multiplications and additions take longer than 1 ms on anything below 2.7 PFLOP/s
    assert bucket_tuner.seconds(begin, end) > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_on_a_gpu_a_watch_sees_every_gradient_before_the_end():
    device = torch.device("cuda", 0)
    model = network().to(device)
    watch = bucket_tuner.GradientTimer(list(model.parameters()), device)
    for _ in range(3):
        loss = model(torch.ones(4, 20, device=device)).sum()
        loss.register_hook(lambda _: watch.begin())
        loss.backward()
    for record in watch.finished:
        assert list(record.ready) == [5, 4, 3, 2, 1, 0] or sorted(record.ready) == list(range(6))
        times = [bucket_tuner.seconds(record.start, moment) for moment in record.ready.values()]
        assert times == sorted(times)
        assert record.whole_s >= times[-1] >= 0
    assert len(watch.finished) == 3
    watch.close()
