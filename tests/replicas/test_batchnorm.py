"""Synchronised BatchNorm against the plain one on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import DataError, ModelError, RankFailure
from samestep.replicas.batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, synchronise_batchnorm
from samestep.runtime.axis import Axis
from samestep.testing import assert_same_bits, largest_difference

PAIR = Axis(name="data", rank=0, ranks=(0, 1))
CPU = torch.device("cpu")

LAYERS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d with length": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 4)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
OPTIONS = {
    "default": {},
    "cumulative average": {"momentum": None},
    "not affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "no bias": {"bias": False},
}


def make_layer(kind, options, dtype=torch.float64):
    torch.manual_seed(1)
    layer = LAYERS[kind][0](3, dtype=dtype, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def make_batches(kind, sizes, steps=3, dtype=torch.float64, offset=5.0):
    torch.manual_seed(2)
    shape = (sum(sizes), 3, *LAYERS[kind][1])
    return [((torch.randn(shape) * 3 + offset).to(dtype), torch.randn(shape).to(dtype)) for _ in range(steps)]


def train(layer, batches, part=slice(None)):
    """What a layer gives and becomes: outputs, input gradients, parameter gradients, buffers."""
    outputs, gradients = [], []
    for x, dy in batches:
        x = x[part].clone().requires_grad_()
        y = layer(x)
        y.backward(dy[part])
        outputs.append(y.detach())
        gradients.append(x.grad)
    return {
        "outputs": outputs,
        "input gradients": gradients,
        "parameter gradients": [parameter.grad for parameter in layer.parameters()],
        "buffers": dict(layer.named_buffers()),
    }


def train_on_ranks(kind, options, sizes, dtype=torch.float64, memory_format=torch.contiguous_format):
    with samestep.world() as world:
        layer = synchronise_batchnorm(make_layer(kind, options, dtype), world.data, world.device)
        start = sum(sizes[: world.rank])
        batches = [(x.to(memory_format=memory_format), dy) for x, dy in make_batches(kind, sizes, dtype=dtype)]
        return train(layer, batches, slice(start, start + sizes[world.rank]))


def joined(results):
    """One process's view of what the ranks gave: outputs joined, parameter gradients summed."""
    return {
        "outputs": [torch.cat(parts) for parts in zip(*(r["outputs"] for r in results), strict=True)],
        "input gradients": [torch.cat(parts) for parts in zip(*(r["input gradients"] for r in results), strict=True)],
        "parameter gradients": [sum(p) for p in zip(*(r["parameter gradients"] for r in results), strict=True)],
        "buffers": results[0]["buffers"],
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sizes", [(3, 4), (5, 0), (0, 2)], ids=str)
def test_two_ranks_equal_one_process_whatever_the_options(two_ranks, sizes, options):
    expected = train(make_layer("2d", options), make_batches("2d", sizes))
    assert largest_difference(joined(two_ranks(train_on_ranks, "2d", options, sizes)), expected) < 1e-12


@pytest.mark.parametrize("kind", LAYERS)
def test_three_ranks_equal_one_process_for_every_shape_of_input(three_ranks, kind):
    sizes = (1, 4, 2)
    expected = train(make_layer(kind, {}), make_batches(kind, sizes))
    assert largest_difference(joined(three_ranks(train_on_ranks, kind, {}, sizes)), expected) < 1e-12


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (0, 0, 1, 7), (1, 1, 0, 1)], ids=str)
def test_four_ranks_equal_one_process_with_uneven_and_empty_shares(four_ranks, sizes):
    expected = train(make_layer("2d", {}), make_batches("2d", sizes))
    assert largest_difference(joined(four_ranks(train_on_ranks, "2d", {}, sizes)), expected) < 1e-12


def test_running_statistics_are_the_same_bits_on_every_rank(four_ranks):
    first, *others = four_ranks(train_on_ranks, "2d", {}, (3, 1, 0, 2))
    for other in others:
        assert_same_bits(other["buffers"], first["buffers"])


def test_channels_last_inputs_give_the_same(two_ranks):
    sizes = (3, 4)
    expected = train(make_layer("2d", {}), make_batches("2d", sizes))
    results = two_ranks(train_on_ranks, "2d", {}, sizes, torch.float64, torch.channels_last)
    assert largest_difference(joined(results), expected) < 1e-12


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_inputs_accumulate_in_float32_and_keep_their_type(two_ranks, dtype, unit):
    sizes = (3, 4)
    results = joined(two_ranks(train_with_float32_layer, sizes, dtype))
    expected = train(make_layer("2d", {}), [(x.double(), dy.double()) for x, dy in make_batches("2d", sizes, 3, dtype)])
    assert {t.dtype for t in results["outputs"] + results["input gradients"]} == {dtype}
    assert results["buffers"]["running_mean"].dtype == torch.float32
    # Outputs are rounded once to `dtype`; they and the gradients are below 16, so an ulp is at most 16 units.
    assert largest_difference(results["outputs"], expected["outputs"]) < 16 * unit
    assert largest_difference(results["input gradients"], expected["input gradients"]) < 16 * unit
    # Statistics never pass through `dtype`: float32 whatever it is, and about 100 units of it away.
    assert largest_difference(results["buffers"], expected["buffers"]) < 100 * 2**-24


def train_with_float32_layer(sizes, dtype):
    with samestep.world() as world:
        layer = synchronise_batchnorm(make_layer("2d", {}, torch.float32), world.data, world.device)
        start = sum(sizes[: world.rank])
        return train(layer, make_batches("2d", sizes, 3, dtype), slice(start, start + sizes[world.rank]))


def variance_far_from_zero(memory_format):
    with samestep.world() as world:
        torch.manual_seed(3)
        x = (torch.randn(64, 2, 32, 32) + 1e4).to(memory_format=memory_format)
        layer = synchronise_batchnorm(nn.BatchNorm2d(2, momentum=1.0), world.data, world.device)
        layer(x.tensor_split(world.size)[world.rank])
        return layer.running_var.double(), x.double().var((0, 2, 3))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_variance_survives_a_mean_ten_thousand_times_as_large(two_ranks, memory_format):
    for ours, exact in two_ranks(variance_far_from_zero, memory_format):
        assert float((ours / exact - 1).abs().max()) < 1e-5


def gradient_and_finite_differences():
    with samestep.world() as world:
        torch.manual_seed(4)
        x = torch.randn(5, 2, 3, dtype=torch.float64)
        power = 2.0 + world.rank  # the ranks' losses differ, so a missing sum cannot cancel
        layer = synchronise_batchnorm(nn.BatchNorm1d(2, dtype=torch.float64), world.data, world.device)
        part = slice(0, 2) if world.rank == 0 else slice(2, 5)

        def joint_loss(point):
            loss = (layer(point[part]) + 1).pow(power).sum().detach()
            torch.distributed.all_reduce(loss, group=world.data.group)
            return float(loss)

        leaf = x[part].clone().requires_grad_()
        (layer(leaf) + 1).pow(power).sum().backward()
        estimate = torch.zeros_like(x)
        for index in range(x.numel()):
            step = torch.zeros(x.numel(), dtype=torch.float64)
            step[index] = 1e-5
            step = step.view_as(x)
            estimate.view(-1)[index] = (joint_loss(x + step) - joint_loss(x - step)) / 2e-5
        return leaf.grad, estimate[part]


def test_input_gradients_are_those_of_the_losses_of_all_ranks_together(two_ranks):
    for gradient, estimate in two_ranks(gradient_and_finite_differences):
        assert torch.allclose(gradient, estimate, rtol=1e-6, atol=1e-7)


def first_layer_of_a_model():
    with samestep.world() as world:
        torch.manual_seed(5)
        x = torch.randn(6, 3, dtype=torch.float64)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        plain = copy.deepcopy(model)
        plain(x).sum().backward()
        synchronise_batchnorm(model, world.data, world.device)
        model(x.tensor_split(world.size)[world.rank]).sum().backward()
        torch.distributed.all_reduce(model[0].weight.grad, group=world.data.group)
        return model[0].weight.grad, plain[0].weight.grad


def test_a_first_layer_whose_input_needs_no_gradient_trains_its_parameters(two_ranks):
    for ours, plain in two_ranks(first_layer_of_a_model):
        assert largest_difference(ours, plain) < 1e-12


def one_value_per_channel():
    with samestep.world() as world:
        layer = synchronise_batchnorm(nn.BatchNorm1d(3), world.data, world.device)
        try:
            layer(torch.randn(world.rank, 3))
        except ValueError as error:
            return type(error), str(error), int(layer.num_batches_tracked)


def test_one_value_per_channel_over_all_ranks_is_refused_on_every_rank(two_ranks):
    for kind, message, tracked in two_ranks(one_value_per_channel):
        assert (kind, tracked) == (DataError, 0)
        assert "more than 1 value per channel when training, got 1 over all 2 ranks" in message


def empty_everywhere():
    with samestep.world() as world:
        layer = synchronise_batchnorm(nn.BatchNorm2d(3), world.data, world.device)
        y = layer(torch.randn(0, 3, 2, 2, requires_grad=True))
        y.sum().backward()
        return y.shape, dict(layer.named_buffers())


def test_a_batch_empty_on_every_rank_leaves_the_statistics_as_the_plain_layer_does(two_ranks):
    plain = nn.BatchNorm2d(3)
    plain(torch.randn(0, 3, 2, 2))
    for shape, buffers in two_ranks(empty_everywhere):
        assert shape == (0, 3, 2, 2)
        assert_same_bits(buffers, dict(plain.named_buffers()))


def evaluate_on_one_rank_only(track_running_stats):
    with samestep.world() as world:
        layer = nn.BatchNorm2d(3, track_running_stats=track_running_stats)
        ours = synchronise_batchnorm(copy.deepcopy(layer), world.data, world.device).eval()
        x = torch.randn(2, 3, 4, 4)
        return torch.equal(ours(x), layer.eval()(x)) if world.rank == 1 else True


@pytest.mark.parametrize("track_running_stats", [True, False])
def test_eval_mode_is_the_plain_layer_and_does_not_communicate(two_ranks, track_running_stats):
    assert two_ranks(evaluate_on_one_rank_only, track_running_stats) == [True, True]


def copy_and_train():
    with samestep.world() as world:
        layer = synchronise_batchnorm(nn.BatchNorm1d(2), world.data, world.device)
        twin = copy.deepcopy(layer)
        x = torch.randn(4, 2)[world.rank :]
        return torch.equal(layer(x), twin(x)) and twin.weight is not layer.weight


def test_a_deep_copy_synchronises_too(two_ranks):
    assert two_ranks(copy_and_train) == [True, True]


def wrong_channels():
    with samestep.world() as world:
        synchronise_batchnorm(nn.BatchNorm1d(4, affine=False), world.data, world.device)(torch.randn(3, 1))


def test_a_wrong_number_of_channels_is_an_error(two_ranks):
    with pytest.raises(RankFailure, match="over 4 channels got an input with 1"):
        two_ranks(wrong_channels)


# --- conversion ------------------------------------------------------------------------------


def nested_model():
    shared = nn.BatchNorm1d(4)
    return nn.Sequential(
        nn.Linear(4, 4), shared, nn.ModuleDict({"inner": nn.Sequential(nn.BatchNorm2d(2), nn.Linear(4, 4))}), shared
    )


def test_conversion_keeps_layers_parameters_and_buffers_themselves():
    model = nested_model()
    model[1].weight.requires_grad_(False)
    model[1].eval()
    model[2]["inner"][0].double()
    before = list(model.modules()), list(model.parameters()), list(model.buffers()), model.state_dict()
    assert synchronise_batchnorm(model, PAIR, CPU) is model
    for kept, now in zip(before, (model.modules(), model.parameters(), model.buffers()), strict=False):
        assert all(a is b for a, b in zip(kept, now, strict=True))
    assert_same_bits(dict(model.state_dict()), dict(before[3]))
    assert (type(model[1]), type(model[2]["inner"][0])) == (SyncBatchNorm1d, SyncBatchNorm2d)
    assert (model[1].training, model[2]["inner"][0].training) == (False, True)
    assert not model[1].weight.requires_grad


def test_a_shared_layer_stays_shared():
    model = synchronise_batchnorm(nested_model(), PAIR, CPU)
    assert model[1] is model[3]


def test_converted_layers_are_still_found_as_what_they_were():
    layer = synchronise_batchnorm(nn.BatchNorm2d(3), PAIR, CPU)
    assert isinstance(layer, nn.BatchNorm2d)
    assert isinstance(layer, SyncBatchNorm)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.zeros(2, 3))


def test_state_passes_to_a_plain_layer_and_back():
    ours = synchronise_batchnorm(nn.BatchNorm2d(3), PAIR, CPU)
    nn.init.normal_(ours.running_mean)
    plain = nn.BatchNorm2d(3)
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())
    assert_same_bits(dict(plain.state_dict()), dict(ours.state_dict()))


def test_alone_nothing_changes():
    model = synchronise_batchnorm(nn.BatchNorm1d(2), Axis(name="data", rank=0, ranks=(0,)), CPU)
    assert type(model) is nn.BatchNorm1d


def test_on_cuda_it_is_pytorchs_own_layer():
    layer = synchronise_batchnorm(nn.BatchNorm2d(3), PAIR, torch.device("cuda", 0))
    assert isinstance(layer, nn.SyncBatchNorm)
    assert layer.process_group is PAIR.group
    copy.deepcopy(layer)


def test_pytorchs_own_layer_is_replaced_on_cpu_where_it_would_raise(two_ranks):
    layer = synchronise_batchnorm(nn.SyncBatchNorm(3), PAIR, CPU)
    assert type(layer) is SyncBatchNorm


def test_a_second_conversion_changes_nothing_but_the_axis():
    other = Axis(name="data", rank=0, ranks=(0, 1, 2))
    layer = synchronise_batchnorm(synchronise_batchnorm(nn.BatchNorm2d(3), PAIR, CPU), other, CPU)
    assert type(layer) is SyncBatchNorm2d
    assert layer.axis is other


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002
        return super().forward(input).relu()


class OtherDefaults(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels, eps=1e-3)


def test_a_layer_with_a_forward_of_its_own_is_refused_and_the_model_left_alone():
    model = nn.Sequential(nn.BatchNorm2d(3), NormAndActivation(3))
    with pytest.raises(ModelError, match="layer '1' is a NormAndActivation"):
        synchronise_batchnorm(model, PAIR, CPU)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_layer_with_other_defaults_only_is_converted():
    layer = synchronise_batchnorm(OtherDefaults(3), PAIR, CPU)
    assert (type(layer), layer.eps) == (SyncBatchNorm2d, 1e-3)


def test_a_lazy_layer_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match="run one batch through the model"):
        synchronise_batchnorm(nn.LazyBatchNorm2d(), PAIR, CPU)


# --- in training -----------------------------------------------------------------------------


def train_a_network(steps, batch_size, micro_batch_size, batchnorm):
    with samestep.world() as world:
        torch.manual_seed(6)
        x, y = torch.randn(37, 1, 6, 6, dtype=torch.float64), torch.randint(0, 3, (37,))
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
            nn.Flatten(1), nn.Linear(16, 3),
        ).double()  # fmt: skip
        replica = samestep.replicate(model, world, batchnorm=batchnorm)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
        batches = samestep.shards(
            torch.utils.data.TensorDataset(x, y), world, batch_size=batch_size, micro_batch_size=micro_batch_size
        )
        done = 0
        while done < steps:
            for part, labels in batches:
                losses = nn.functional.cross_entropy(replica(part), labels, reduction="none")
                batches.mean(losses).backward()
                if batches.step_ends:
                    optimizer.step()
                    optimizer.zero_grad()
                    done += 1
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("batch_size", [5, pytest.param(8, marks=pytest.mark.prove)])
def test_twenty_steps_of_a_network_equal_one_process(three_ranks, batch_size):
    expected = train_a_network(20, batch_size, None, None)
    results = three_ranks(train_a_network, 20, batch_size, None, None)
    assert_same_bits(results[1:], results[:1] * 2)
    assert largest_difference(results[0], expected) < 1e-12


def test_local_statistics_are_another_training(two_ranks):
    expected = train_a_network(20, 8, None, None)
    assert largest_difference(two_ranks(train_a_network, 20, 8, None, "local")[0], expected) > 1e-3


@pytest.mark.parametrize("batch_size", [10, *(pytest.param(size, marks=pytest.mark.prove) for size in (8, 5))])
def test_with_micro_batches_n_ranks_equal_one_process_with_micro_batches_as_large_as_theirs_together(
    three_ranks, batch_size
):
    expected = train_a_network(20, batch_size, 6, None)
    results = three_ranks(train_a_network, 20, batch_size, 2, None)
    assert_same_bits(results[1:], results[:1] * 2)
    assert largest_difference(results[0], expected) < 1e-12
