"""A NaN or Inf is caught before the optimizer has changed anything, by the right rank's name, on all ranks alike."""

import copy
import io
import itertools
import json
import os
import subprocess
import sys
import warnings
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.errors import NonFiniteError, UsageError
from samestep.replicas import culprits, nonfinite
from samestep.testing import assert_same_bits

BAD = 21  # a sample of step 2, whose samples 16 to 23 lie on rank 1 of 2 and of 3
NAN = float("nan")


def samples(bad=BAD, value=NAN):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
    if bad is not None:
        x[bad] = value
    return TensorDataset(x, torch.arange(64) % 3)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def steps(world, model, data, *, micro=None):
    """Yields after each backward of a micro-batch."""
    batches = samestep.shards(data, world, batch_size=8, micro_batch_size=micro, shuffle=False)
    for x, y in batches:
        batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
        yield batches


def caught(world, model, optimizer, data, **options):
    """Trains until the guard stops it, with parameters and optimizer as before the step; returns the error."""
    set_to_none = options.pop("set_to_none", True)
    for batches in steps(world, model, data, **options):
        if not batches.step_ends:
            continue
        before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
        try:
            optimizer.step()
        except NonFiniteError as error:
            assert_same_bits((dict(model.state_dict()), optimizer.state_dict()), before)
            return str(error), error.ranks, error.secondary
        optimizer.zero_grad(set_to_none=set_to_none)
    return None


def stopped(policy=None, **options):
    with samestep.world() as world:
        model = samestep.replicate(net(), world, nonfinite=policy)
        return caught(world, model, adam(model.parameters()), samples(), **options)


@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks"])
def test_a_nan_of_one_rank_stops_all_before_the_optimizer_and_names_rank_and_tensor(ranks, request):
    run = request.getfixturevalue(ranks)
    results = run(stopped)
    assert run(stopped, "stop") == results
    text = results[0][0]
    assert text.startswith("rank 1's gradient of 2.")
    assert "NaN among" in text
    assert "what its loss gave back was not finite, either" in text
    assert "Averaged, 4 tensors had it on all ranks; seen before AdamW's step 3. No parameter was changed" in text
    assert results == [(text, (1,), rank != 1) for rank in range(run.size)]


def test_alone_it_names_the_tensor():
    text, ranks, secondary = stopped()
    assert text.startswith("the gradient of 2.bias holds 3 NaN among 3 elements, and 3 more tensors are like it; seen")
    assert (ranks, secondary) == ((0,), False)


def test_only_what_the_optimizer_would_use_counts_in_accumulation(two_ranks):
    # step 2 begins at 16: of rank 1's samples 20 to 23, number 21 is in the second of four micro-batches
    for text, ranks, _ in two_ranks(lambda: stopped(micro=1)):
        assert text.startswith("rank 1's gradient of 2.")
        assert "AdamW's step 3" in text
        assert ranks == (1,)


def test_gradients_that_stay_where_they_are_are_told_apart_too(two_ranks):
    for text, ranks, _ in two_ranks(lambda: stopped(set_to_none=False)):
        assert text.startswith("rank 1's gradient of 2.")
        assert "holds NaN or Inf among" in text  # only its sum is known
        assert ranks == (1,)


def test_of_a_large_model_only_sums_are_kept(two_ranks):
    def only_sums():
        culprits.HELD_MOST, before = 0, culprits.HELD_MOST
        try:
            return stopped()
        finally:
            culprits.HELD_MOST = before

    for text, ranks, _ in two_ranks(only_sums):
        assert "rank 1's gradient of 2." in text
        assert "holds NaN or Inf among" in text
        assert ranks == (1,)


def poisoned_inside(value):
    """On the last rank, backward puts one bad number into one weight's gradient."""
    with samestep.world() as world:
        model = samestep.replicate(net(), world)

        def poison(gradient):
            gradient = gradient.clone()
            gradient[5, 2] = value
            return gradient

        if world.rank == world.size - 1:
            model.module[0].weight.register_hook(poison)
        return caught(world, model, adam(model.parameters()), samples(None))


@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (float("inf"), "Inf"), (-float("inf"), "Inf")])
def test_a_single_number_that_goes_bad_inside_the_model_is_found(two_ranks, value, kind):
    text = (
        f"rank 1's gradient of 0.weight holds 1 {kind} among 32 elements: its loss gave back finite numbers. Averaged, "
        "1 tensor had it on all ranks; seen before AdamW's step 1. No parameter was changed; "
        "samestep.replicate(model, world, nonfinite='skip') leaves such steps out"
    )
    assert two_ranks(poisoned_inside, value) == [(text, (1,), True), (text, (1,), False)]


def infinities_of_both_signs():
    with samestep.world() as world:
        model = samestep.replicate(net(), world)
        sign = 1 - 2 * world.rank
        model.module[0].weight.register_hook(lambda gradient: torch.full_like(gradient, sign * float("inf")))
        return caught(world, model, adam(model.parameters()), samples(None))


def test_several_ranks_are_named_where_several_brought_it(two_ranks):
    # Inf + -Inf is NaN on all; each rank's own was Inf
    for text, ranks, secondary in two_ranks(infinities_of_both_signs):
        assert text.startswith("rank 0's (and rank 1's) gradient of 0.weight holds 32 Inf among 32 elements")
        assert (ranks, secondary) == ((0, 1), False)


def second_backward():
    """Rank 0 brings a NaN in the first of two backwards; the second adds to gradients that are averaged already."""
    with samestep.world() as world:
        model = samestep.replicate(net(), world)
        optimizer = adam(model.parameters())
        x = torch.ones(2, 4)
        model(x * (NAN if world.rank == 0 else 1.0)).sum().backward()
        model(x).sum().backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            return error.ranks
        return None


def test_a_second_backward_does_not_spread_the_blame(two_ranks):
    assert two_ranks(second_backward) == [(0,), (0,)]


def thawed():
    with samestep.world() as world:
        model = samestep.replicate(net(), world)
        model.module[0].requires_grad_(False)
        optimizer = adam(model.parameters())
        for number, batches in enumerate(steps(world, model, samples(None))):
            if number == 1:
                model.module[0].requires_grad_(True)
            if number == 2 and world.rank == 0:
                model.module[0].bias.register_hook(lambda gradient: gradient * NAN)
            try:
                optimizer.step()
            except NonFiniteError as error:
                return str(error), error.ranks, batches.step
            optimizer.zero_grad()
        return None


def test_layers_that_are_thawed_later_are_named(two_ranks):
    for text, ranks, step in two_ranks(thawed):
        assert text.startswith("rank 0's gradient of 0.bias holds 8 NaN among 8 elements")
        assert (ranks, step) == ((0,), 3)


def on_virtual_ranks():
    with samestep.world(virtual_ranks=4) as world:
        model = samestep.replicate(net(), world)
        return caught(world, model, adam(model.parameters()), samples())


def test_on_virtual_ranks_the_process_is_named_that_computed_the_slice(two_ranks):
    for text, ranks, _ in two_ranks(on_virtual_ranks):
        assert text.startswith("rank 1's gradient of 2.")
        assert "holds NaN or Inf among 3 elements, in the slice of virtual rank 2" in text
        assert (ranks, "AdamW's step 3" in text) == ((1,), True)


def test_alone_the_virtual_rank_is_named_too():
    text, _, _ = on_virtual_ranks()
    assert text.startswith(
        "the gradient of 2.bias holds 3 NaN among 3 elements, in the slice of virtual rank 2, and 3 "
    )


def spread_by_batchnorm(poison):
    """On rank 1 the data, or the loss, are not finite; synchronised BatchNorm carries it to all."""
    with samestep.world() as world:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        model = samestep.replicate(layers, world)
        optimizer = adam(model.parameters())
        batches = samestep.shards(samples(None), world, batch_size=8, shuffle=False)
        x, y = next(iter(batches))
        if world.rank == 1 and poison != "loss":
            x[0, 0] = NAN
        losses = F.cross_entropy(model(x.clone() if poison == "a copy" else x), y, reduction="none")
        batches.mean(losses * NAN if world.rank == 1 and poison == "loss" else losses).backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            return str(error), error.ranks, error.secondary
        return None


@pytest.mark.parametrize(
    ("poison", "ranks", "told"),
    [
        (
            "data",
            (1,),
            "Its input holds 1 NaN among 16 elements, which synchronised BatchNorm carried to the other ranks",
        ),
        ("a copy", (0, 1), "Synchronised BatchNorm carries it from one rank to all, so where it began is not known"),
        ("loss", (1,), "Synchronised BatchNorm carried it to the other ranks"),
    ],
)
def test_what_synchronised_batchnorm_has_spread_is_blamed_on_whom_it_began_with(two_ranks, poison, ranks, told):
    for rank, (text, blamed, secondary) in enumerate(two_ranks(spread_by_batchnorm, poison)):
        assert told in text, text
        assert (blamed, secondary) == (ranks, rank not in ranks)


def large(policy, place):
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(400, 400), world, nonfinite=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def poison(gradient):
            gradient = gradient.clone()
            gradient[place] = NAN
            return gradient

        if world.rank == 1:
            model.module.weight.register_hook(poison)
        model(torch.ones(1, 400)).sum().backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            return str(error), error.ranks


def test_the_rank_of_a_single_element_of_a_large_tensor_is_named(two_ranks):
    for text, ranks in two_ranks(large, None, (0, 9)):
        assert "on all ranks; its rank is not known: of large tensors, nonfinite='stop' tells it" in text
        assert ranks == ()
    for text, ranks in two_ranks(large, "stop", (7, 9)):
        assert text.startswith(
            "rank 1's gradient of weight holds NaN or Inf among 160,000 elements: its loss gave back f"
        )
        assert ranks == (1,)


def changed_after_the_average(ranks):
    culprits.TIMEOUT_S, before = 1.0, culprits.TIMEOUT_S
    try:
        with samestep.world() as world:
            model = samestep.replicate(net(), world)
            optimizer = adam(model.parameters())
            for _ in steps(world, model, samples(None)):
                if world.rank in ranks:
                    model.module[2].bias.grad[0] = NAN
                try:
                    optimizer.step()
                except NonFiniteError as error:
                    return str(error), error.ranks, error.secondary
                return None
    finally:
        culprits.TIMEOUT_S = before


def test_what_was_changed_on_all_ranks_after_the_average_blames_none(two_ranks):
    for text, ranks, secondary in two_ranks(changed_after_the_average, (0, 1)):
        assert "on all ranks; those of each rank were finite, so it was changed after they were averaged" in text
        assert (ranks, secondary) == ((), False)


def test_what_was_changed_on_one_rank_alone_is_said_by_that_rank(two_ranks):
    other, (text, ranks, secondary) = two_ranks(changed_after_the_average, (1,))
    assert other is None
    assert text.startswith("the gradient of 2.bias holds 1 NaN among 3 elements on rank 1, and within 1 s no other")
    assert (ranks, secondary) == ((1,), False)


KINDS = {
    "sgd",
    "sgd, fused",
    "adam",
    "adamw, foreach",
    "adamw, one by one",
}  # one of each kind of step; the rest in prove
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}


def skipping(name, policy, left_out):
    """Trains over 8 steps; `left_out` is one after which the script itself does not step."""
    said = io.StringIO()
    with samestep.world() as world, redirect_stderr(said):
        model = samestep.replicate(net(), world, nonfinite=policy)
        optimizer = OPTIMIZERS[name](model.parameters())
        for number, _ in enumerate(steps(world, model, samples())):
            if number != left_out:
                optimizer.step()
            optimizer.zero_grad()
        counts = None if model.nonfinite is None else model.nonfinite.state_dict()
        return (dict(model.state_dict()), optimizer.state_dict()), counts, said.getvalue()


@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.prove) for name in OPTIMIZERS]
)
def test_a_skipped_step_leaves_no_trace(two_ranks, name):
    skipped, oracle = two_ranks(skipping, name, "skip", None), two_ranks(skipping, name, "off", 2)
    for rank in range(2):
        assert_same_bits(skipped[rank][0], oracle[rank][0], f"rank {rank}")
        assert skipped[rank][1] == {"skipped": 1, "in_a_row": 0, "found": 1}
    assert_same_bits(skipped[0][0], skipped[1][0])


def test_a_skipped_step_is_told_once_by_the_first_rank(three_ranks):
    (*_, first), *others = three_ranks(skipping, "sgd", "skip", None)
    assert first.startswith("samestep: skips a step: rank 1's gradient of 2.")
    assert first.count("\n") == 1
    assert [said for *_, said in others] == ["", ""]


def random_poison(seed):
    """Some steps of some ranks are bad, in some tensor; what is left must be what the script itself leaves out."""
    draw = torch.Generator().manual_seed(seed)
    size = int(os.environ["WORLD_SIZE"])
    poison = {}
    for number in range(8):
        if torch.rand((), generator=draw) < 0.4:
            who = (torch.rand(size, generator=draw) < 0.5).nonzero().flatten().tolist() or [number % size]
            poison[number] = (who, int(torch.randint(4, (), generator=draw)))

    def train(policy):
        with samestep.world() as world, redirect_stderr(io.StringIO()) as said:
            model = samestep.replicate(net(), world, nonfinite=policy)
            optimizer = OPTIMIZERS["adam"](model.parameters())
            now = [0]
            for place, parameter in enumerate(model.parameters()):

                def hook(gradient, place=place):
                    who, bad = poison.get(now[0], ((), -1))
                    return gradient * NAN if bad == place and world.rank in who else gradient

                parameter.register_hook(hook)
            for _ in steps(world, model, samples(None)):
                if policy == "skip" or now[0] not in poison:
                    optimizer.step()
                optimizer.zero_grad()
                now[0] += 1
            names = [name for name, _ in model.named_parameters()]
            return dict(model.state_dict()), said.getvalue().splitlines(), names

    expected, _, names = train("off")
    state, said, _ = train("skip")
    assert_same_bits(state, expected)
    if os.environ["RANK"] == "0":
        assert len(said) == len(poison)
        for line, (who, place) in zip(said, poison.values(), strict=True):
            assert f"rank {who[0]}'s" in line
            assert f"gradient of {names[place]} holds" in line
            assert all(f" {rank}" in line.partition(" gradient")[0] for rank in who)
    return len(poison)


@pytest.mark.parametrize("seed", range(4))
def test_any_ranks_steps_and_tensors_are_told_apart(three_ranks, seed):
    assert len(set(three_ranks(random_poison, seed))) == 1


def test_too_many_skipped_steps_in_a_row_stop_the_run(monkeypatch):
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 3)
    said = io.StringIO()
    with samestep.world() as world, redirect_stderr(said):
        model = samestep.replicate(net(), world, nonfinite="skip")
        optimizer = adam(model.parameters())
        text, *_ = caught(world, model, optimizer, samples(slice(24, None)))
        assert text.startswith("3 steps in a row could not be used, so skipping does not help: the gradient of 2.bias")
        assert "AdamW's step 6" in text
    assert said.getvalue().count("\n") == 2


def test_after_ten_skipped_steps_the_rest_is_only_counted():
    said = io.StringIO()
    with samestep.world() as world, redirect_stderr(said):
        model = samestep.replicate(net(), world, nonfinite="skip")
        optimizer = adam(model.parameters())
        for _ in range(12):
            model(torch.full((1, 4), NAN)).sum().backward()
            optimizer.step()
        assert model.nonfinite.skipped == 12
    assert said.getvalue().count("\n") == 10
    assert said.getvalue().endswith("; more will only be counted\n")


def warned():
    with samestep.world() as world, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = samestep.replicate(net(), world, nonfinite="warn")
        optimizer = adam(model.parameters())
        for number, _ in enumerate(steps(world, model, samples())):
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                break
        return [(str(one.message)[:24], one.filename) for one in seen], model.nonfinite.found


def test_a_warning_goes_on_and_shows_the_script_s_line(two_ranks):
    first, second = two_ranks(warned)
    assert first == ([("rank 1's gradient of 2.b", __file__)], 1)
    assert second == ([], 1)


def test_without_a_guard_nothing_is_looked_at():
    with samestep.world() as world:
        model = samestep.replicate(net(), world, nonfinite="off")
        assert (model.nonfinite.policy, model.nonfinite.local) == ("off", None)
        assert caught(world, model, adam(model.parameters()), samples()) is None


LARGE = {
    "a linear layer": (lambda: nn.Linear(400, 400, bias=False), (3, 400)),
    "a convolution": (lambda: nn.Conv2d(130, 130, 3, padding=1, bias=False), (2, 130, 4, 4)),
    "a convolution in strides": (lambda: nn.Conv2d(130, 130, 3, stride=2, padding=1, bias=False), (2, 130, 4, 4)),
}


@pytest.mark.parametrize("bad", ["what came forward", "what came back"])
@pytest.mark.parametrize("name", LARGE)
def test_a_glance_sees_what_went_through_a_matrix_product(name, bad):
    make, shape = LARGE[name]
    draw = torch.Generator().manual_seed(5)
    with samestep.world() as world:
        model = samestep.replicate(make(), world)
        assert model.module.weight.numel() > culprits.LARGE
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(8):
            x = torch.randn(shape, generator=draw)
            back = torch.ones_like(model(x)).detach()
            place = x if bad == "what came forward" else back
            place.view(-1)[int(torch.randint(place.numel(), (), generator=draw))] = (NAN, float("inf"))[number % 2]
            model(x).backward(back)
            assert not torch.isfinite(culprits.probe_row_and_column(model.module.weight.grad))
            with pytest.raises(NonFiniteError, match="the gradient of weight holds"):
                optimizer.step()
            optimizer.zero_grad()


def test_a_glance_sees_a_bad_row_of_an_embedding():
    with samestep.world() as world:
        model = samestep.replicate(nn.Embedding(400, 400), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = model(torch.tensor([7, 399]))
        found.backward(torch.tensor([[1.0], [NAN]]).expand_as(found))
        assert not torch.isfinite(culprits.probe_row_and_column(model.module.weight.grad))
        with pytest.raises(NonFiniteError, match="the gradient of weight holds 400 NaN among 160,000 elements"):
            optimizer.step()


@pytest.mark.parametrize(("policy", "sees"), [(None, False), ("stop", True)])
def test_a_single_element_of_a_large_tensor_is_seen_by_those_who_asked(policy, sees):
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(400, 400), world, nonfinite=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 400)).sum().backward()
        model.module.weight.grad[7, 9] = NAN
        if not sees:
            optimizer.step()
            return
        with pytest.raises(NonFiniteError, match="the gradient of weight holds 1 NaN among 160,000 elements"):
            optimizer.step()


def skipped_with_batchnorm(virtual):
    """A NaN in one input of the second step; returns the statistics after it, and after the same steps without it."""
    found = []
    for poisoned in (True, False):
        with samestep.world(virtual_ranks=virtual) as world:
            torch.manual_seed(2)
            model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
            model = samestep.replicate(model, world, nonfinite="skip", batchnorm="local" if virtual else None)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
            if poisoned:
                inputs[20] = NAN
            batches = samestep.shards(torch.utils.data.TensorDataset(inputs), world, batch_size=16, shuffle=False)
            for (x,) in batches:
                if not poisoned and 16 <= batches._current.step.start < 32:
                    continue  # the oracle never computes that step
                batches.mean(model(x).square().sum(1)).backward()
                if batches.step_ends:
                    optimizer.step()
                    optimizer.zero_grad()
                    batches.commit()
            model.sync_buffers()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize("virtual", [None, 2, 4])
def test_a_skipped_step_leaves_no_trace_in_statistics_either(two_ranks, virtual):
    for with_it, without in two_ranks(skipped_with_batchnorm, virtual):
        assert_same_bits(with_it, without)


def alone_and_going_on():
    """Rank 1 spoils its own gradients; rank 0 goes on to its next step, and to collectives of its own."""
    culprits.TIMEOUT_S, before = 2.0, culprits.TIMEOUT_S
    try:
        with samestep.world(timeout=20) as world:
            model = samestep.replicate(net(), world)
            optimizer = adam(model.parameters())
            for number in range(3):
                model(torch.ones(2, 4)).sum().backward()
                if world.rank == 1 and number == 1:
                    model.module[2].bias.grad[0] = NAN
                try:
                    optimizer.step()
                except NonFiniteError as error:
                    return str(error)
                world.barrier()
    except RuntimeError:
        return "lost its peer"
    finally:
        culprits.TIMEOUT_S = before


def test_a_rank_that_is_alone_says_so_while_the_others_go_on(two_ranks):
    other, text = two_ranks(alone_and_going_on)
    assert other == "lost its peer"
    assert "it was changed on this rank alone, after it was averaged" in text


def test_an_unknown_policy_is_refused():
    with samestep.world() as world, pytest.raises(UsageError, match="use 'stop', 'skip', 'warn' or 'off'"):
        samestep.replicate(net(), world, nonfinite="ignore")


def scaled(fused):
    """A scale that overflows float32 in the first steps: the scaler leaves those out, and halves it."""
    with samestep.world() as world:
        model = samestep.replicate(net(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(world.device.type, init_scale=2.0**127)
        batches = samestep.shards(samples(None), world, batch_size=8, shuffle=False)
        for x, y in batches:
            loss = batches.mean(100 * F.cross_entropy(model(x), y, reduction="none"))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        return scaler.get_scale() < 2.0**127, model.nonfinite.found


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_of_a_gradient_scaler_are_its_own_affair(two_ranks, fused):
    assert two_ranks(scaled, fused) == [(True, 0), (True, 0)]


def two_models():
    with samestep.world() as world, redirect_stderr(io.StringIO()):
        good, bad = (samestep.replicate(net(), world, nonfinite="skip") for _ in range(2))
        before = copy.deepcopy(dict(bad.state_dict()))
        stepped = copy.deepcopy(dict(good.state_dict()))
        x = torch.ones(2, 4)
        optimizers = [adam(model.parameters()) for model in (good, bad)]
        good(x).sum().backward()
        bad(x * (NAN if world.rank == 1 else 1.0)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bits(dict(bad.state_dict()), before)
        return good.nonfinite.skipped, bad.nonfinite.skipped, torch.equal(good.module[0].bias, stepped["0.bias"])


def test_several_models_and_optimizers_each_by_itself(two_ranks):
    assert two_ranks(two_models) == [(0, 1, False), (0, 1, False)]


def test_optimizers_of_other_models_are_left_alone():
    with samestep.world() as world:
        guarded = samestep.replicate(net(), world)
        other = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
        other(torch.full((1, 1), NAN)).sum().backward()
        optimizer.step()
        assert other.weight.isnan().all()
        assert guarded.nonfinite.found == 0


def sparse():
    with samestep.world() as world:
        model = samestep.replicate(nn.Sequential(nn.Embedding(10, 2, sparse=True), nn.Linear(2, 1)), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.tensor([1, 2 + world.rank])
        for number in range(3):
            if number == 2 and world.rank == 1:
                model.module[0].weight.register_hook(lambda gradient: gradient * NAN)
            model(rows).sum().backward()
            try:
                optimizer.step()
            except NonFiniteError as error:
                return str(error)[:33], error.ranks, number
            optimizer.zero_grad()
        return None


def test_sparse_gradients_are_looked_into(two_ranks):
    assert two_ranks(sparse) == [("rank 1's gradient of 0.weight hol", (1,), 2)] * 2


def test_large_finite_gradients_whose_sum_overflows_are_used():
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(2, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
        model(torch.full((1, 2), 3e38)).sum().backward()
        optimizer.step()
        assert model.nonfinite.found == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_floating_dtype_is_looked_at(dtype):
    with samestep.world() as world:
        model = samestep.replicate(nn.ParameterList([torch.ones(300, dtype=dtype)]), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.module[0].grad = torch.full((300,), 500.0, dtype=dtype)  # float16: the sum is above its largest
        optimizer.step()
        model.module[0].grad[7] = float("-inf")
        with pytest.raises(NonFiniteError, match="the gradient of 0 holds 1 Inf among 300 elements"):
            optimizer.step()


def closure_of(model, optimizer, x, calls):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    return closure


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_s_gradients_are_judged_once_they_are_there(by_name):
    with samestep.world() as world, redirect_stderr(io.StringIO()):
        model = samestep.replicate(net(), world, nonfinite="skip")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for value in (1.0, NAN, 1.0):
            before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
            closure = closure_of(model, optimizer, torch.full((2, 4), value), [])
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            same = torch.equal(before[0]["0.weight"], model.module[0].weight)
            assert same == (value != 1.0)
        assert model.nonfinite.skipped == 1


class Damped(torch.optim.SGD):
    """An optimizer of its own, whose steps take a function of an argument, and a number."""

    def step(self, residuals, damping):
        residuals(damping)
        super().step()
        return damping


def test_an_optimizer_may_give_arguments_to_what_its_step_takes():
    with samestep.world() as world:
        model = samestep.replicate(net(), world, nonfinite="skip")
        optimizer = Damped(model.parameters(), lr=0.1)
        seen = []
        assert optimizer.step(seen.append, 0.5) == 0.5
        assert optimizer.step(lambda damping: seen.append(2 * damping), 0.5) == 0.5
        assert seen == [0.5, 1.0]


def test_lbfgs_skips_what_it_begins_with_and_stops_at_what_it_went_to():
    with samestep.world() as world, redirect_stderr(io.StringIO()):
        model = samestep.replicate(net(), world, nonfinite="skip")
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        before = copy.deepcopy(dict(model.state_dict()))
        optimizer.step(closure_of(model, optimizer, torch.full((2, 4), NAN), []))
        assert_same_bits(dict(model.state_dict()), before)
        x = torch.ones(2, 4)
        calls: list[float] = []
        good = closure_of(model, optimizer, x, calls)

        def turns_bad():
            if calls:
                x.fill_(NAN)
            return good()

        with pytest.raises(NonFiniteError, match="had moved the parameters before it asked for these gradients"):
            optimizer.step(turns_bad)


def test_counts_go_through_a_checkpoint(tmp_path):
    def train(value, policy="skip"):
        with samestep.world() as world, redirect_stderr(io.StringIO()):
            model = samestep.replicate(net(), world, nonfinite=policy)
            optimizer = adam(model.parameters())
            batches = samestep.shards(samples(), world, batch_size=8, shuffle=False)
            state = samestep.checkpoint(
                tmp_path, world, every=4, model=model, optimizer=optimizer, data=batches, guard=model.nonfinite
            )
            resumed = None
            for _ in state.epochs(1):
                resumed = model.nonfinite.skipped
                for x, y in batches:
                    batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()
                    if batches.step == value:
                        state.save()
                        break
                break
            return resumed, model.nonfinite.skipped

    assert train(4) == (0, 1)
    assert train(8, "off")[0] == 1
    assert train(8)[0] == 1


def saved_and_copied():
    with samestep.world() as world:
        model = samestep.replicate(net(), world)
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model.module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return copied.nonfinite is None, torch.equal(loaded[0].weight, model.module[0].weight)


def test_saved_and_copied_models_are_without_a_guard(two_ranks):
    assert two_ranks(saved_and_copied) == [(True, True)] * 2


def let_go():
    with samestep.world() as world:
        model = samestep.replicate(net(), world)
        optimizer = adam(model.parameters())
        kept = []
        for _ in steps(world, model, samples(None)):
            before = len(model.nonfinite.local._noted)
            optimizer.step()
            kept.append((before, len(model.nonfinite.local._noted)))
            optimizer.zero_grad()
        return set(kept)


def test_gradients_are_let_go_of_when_the_optimizer_steps(two_ranks):
    assert two_ranks(let_go) == [{(4, 0)}] * 2


SCRIPT = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import samestep

with samestep.world() as world:
    model = samestep.replicate(torch.nn.Linear(4, 3), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(24, 4)
    x[13] = float("inf")
    batches = samestep.shards(TensorDataset(x, torch.zeros(24).long()), world, batch_size=6, shuffle=False)
    for x, y in batches:
        batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_launcher_blames_the_rank_that_brought_it(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "samestep", "run", "-n", "3", "--json", "result.json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    failure = json.loads((tmp_path / "result.json").read_text())["failure"]
    assert done.returncode == 1, done.stderr
    assert (failure["rank"], failure["exception"], failure["where"]) == (0, "NonFiniteError", "train.py:15")
    assert failure["message"].startswith("rank 0's gradient of ")
    assert "ranks 1-2 lost their connection to it" in done.stderr
    assert done.stderr.count("rank 0's gradient of ") == 1
    assert (
        "[3 ranks] samestep: stops at train.py:15 with NonFiniteError; the rank's log has the traceback" in done.stderr
    )
    for log in tmp_path.glob("runs/*/0/*/rank?.err"):
        text = log.read_text()
        assert text.count("Traceback (most recent call last)") == 1
        assert text.rstrip().splitlines()[-1].startswith("samestep.errors.NonFiniteError: rank 0's gradient of ")


def test_the_guards_of_one_optimizer_report_in_the_order_of_their_models(monkeypatch):
    """Each report is an exchange of all ranks, and a set of guards has another order on each."""
    with samestep.world() as world:
        models = [samestep.replicate(net(), world) for _ in range(3)]
        optimizer = adam([parameter for model in models for parameter in model.parameters()])
        for order in itertools.permutations(model.nonfinite for model in models):
            monkeypatch.setattr(nonfinite, "_guards", list(order))
            nonfinite._watched.clear()
            found = [guard for guard, _ in nonfinite._watched_of(optimizer).guards]
            assert found == [model.nonfinite for model in models]
