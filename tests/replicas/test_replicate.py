import copy
import gc
import io
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.data.order import SampleOrder
from samestep.errors import DataError, DeviceError, EmptyBatchError, ModelError, StepError
from samestep.replicas.replicate import try_empty
from samestep.testing import assert_same_bits

TOLERANCE = 1e-12  # float64, values of order 1, sums of at most 12 terms over 6 steps


def test_alone_a_replica_is_the_bare_model():
    with samestep.world() as world:
        bare = nn.Linear(2, 3)
        model = samestep.replicate(bare, world)
        x = torch.ones(4, 2)
        assert torch.equal(model(x), bare(x))


def names():
    with samestep.world() as world:
        model = samestep.replicate(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), world)
        return (
            list(model.state_dict()),
            [name for name, _ in model.named_parameters()],
            [name for name, _ in model.named_buffers()],
            len(list(model.parameters())),
        )


def test_names_have_no_prefix(two_ranks):
    bare = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    expected = (
        list(bare.state_dict()),
        [name for name, _ in bare.named_parameters()],
        [name for name, _ in bare.named_buffers()],
        4,
    )
    assert two_ranks(names) == [expected, expected]
    assert names() == expected


def different_starts():
    with samestep.world() as world:
        torch.manual_seed(world.rank)
        bare = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        bare[1].running_mean.fill_(world.rank)
        return dict(samestep.replicate(bare, world).state_dict())


def test_rank_0s_parameters_and_buffers_reach_all(two_ranks):
    first, second = two_ranks(different_starts)
    assert_same_bits(first, second)
    assert first["1.running_mean"].tolist() == [0, 0, 0]


def reductions():
    """How often gradients travelled: equal gradients on all ranks mean that they did."""
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(1, 1, bias=False), world)
        data = TensorDataset(torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
        seen = []
        for (x,) in (batches := samestep.shards(data, world, batch_size=4, micro_batch_size=1, shuffle=False)):
            batches.mean(model(x).flatten()).backward()
            seen.append(model.module.weight.grad.item())
        return seen


def test_gradients_travel_on_the_micro_batch_that_ends_the_step_and_only_then(two_ranks):
    # before: each rank's own, times 2 for DDP's division, over 4 samples; at the end: the mean of 1, 2, 4 and 8
    assert two_ranks(reductions) == [[0.5, 3.75], [1.0, 3.75]]


def without_shards():
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(1, 1, bias=False), world)
        model(torch.tensor([[1.0 + world.rank]])).sum().backward()
        return model.module.weight.grad.item()


def test_without_shards_every_backward_averages(two_ranks):
    assert two_ranks(without_shards) == [1.5, 1.5]


# --- several models and optimizers side by side: a GAN with BatchNorm ---


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))


GAN_SAMPLES, GAN_BATCH, GAN_STEPS = 32, 10, 6


def gan_data():
    draw = torch.Generator().manual_seed(2)
    real = torch.randn(GAN_SAMPLES, 2, generator=draw, dtype=torch.float64) + 3
    return TensorDataset(real, torch.randn(GAN_SAMPLES, 3, generator=draw, dtype=torch.float64))


def gan_step(generator, discriminator, optimizers, real, noise, mean, *, freeze):
    """One step as people write it: two forwards of the discriminator before its backward, then the generator's."""

    def against(logits, label):
        target = torch.full_like(logits, label)
        return mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none").flatten())

    for_generator, for_discriminator = optimizers
    fake = generator(noise)
    for_discriminator.zero_grad()
    (against(discriminator(real), 1.0) + against(discriminator(fake.detach()), 0.0)).backward()
    for_discriminator.step()
    for_generator.zero_grad()
    discriminator.requires_grad_(not freeze)
    against(discriminator(fake), 1.0).backward()
    discriminator.requires_grad_(True)
    for_generator.step()


def train_gan(freeze):
    with samestep.world() as world:
        torch.manual_seed(0)
        generator = samestep.replicate(Generator().double(), world)
        torch.manual_seed(1)
        discriminator = samestep.replicate(Discriminator().double(), world)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (generator, discriminator)]
        batches = samestep.shards(gan_data(), world, batch_size=GAN_BATCH)
        steps = 0
        while steps < GAN_STEPS:
            for real, noise in batches:
                gan_step(generator, discriminator, optimizers, real, noise, batches.mean, freeze=freeze)
                steps += 1
                if steps == GAN_STEPS:
                    break
        return {**{f"g.{k}": v for k, v in generator.state_dict().items()}, **dict(discriminator.state_dict())}


def train_gan_alone(freeze):
    torch.manual_seed(0)
    generator = Generator().double()
    torch.manual_seed(1)
    discriminator = Discriminator().double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (generator, discriminator)]
    real, noise = gan_data().tensors
    steps, epoch = 0, 0
    while steps < GAN_STEPS:
        order = torch.from_numpy(SampleOrder(GAN_SAMPLES, seed=0, epoch=epoch).take(0, GAN_SAMPLES))
        for start in range(0, GAN_SAMPLES, GAN_BATCH):
            chosen = order[start : start + GAN_BATCH]
            if steps == GAN_STEPS:
                break
            gan_step(generator, discriminator, optimizers, real[chosen], noise[chosen], torch.mean, freeze=freeze)
            steps += 1
        epoch += 1
    return {**{f"g.{k}": v for k, v in generator.state_dict().items()}, **dict(discriminator.state_dict())}


@pytest.mark.parametrize("freeze", [False, True], ids=["discriminator trainable", "discriminator frozen in turn"])
def test_a_gan_with_batchnorm_trains_as_on_one_process(three_ranks, freeze):
    alone = train_gan_alone(freeze)
    for state in three_ranks(train_gan, freeze):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            assert (value.double() - alone[name].double()).abs().max() < TOLERANCE, name


# --- mixed precision, dropout, unused parameters ---


def train_bf16():
    with samestep.world() as world:
        model = samestep.replicate(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(24, 4, generator=draw), torch.randint(0, 2, (24,), generator=draw))
        batches = samestep.shards(data, world, batch_size=12, micro_batch_size=3)
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = F.cross_entropy(model(x), y, reduction="none")
            batches.mean(losses).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
        return dict(model.state_dict())


def test_bf16_autocast_keeps_float32_weights_equal_on_all_ranks_and_near_one_process(two_ranks):
    alone = train_bf16()
    first, second = two_ranks(train_bf16)
    assert_same_bits(first, second)
    for name, value in first.items():
        assert value.dtype == torch.float32
        # bf16 rounds each product to 2^-8 relative; one process differs in the order of float32 sums alone
        assert (value - alone[name]).abs().max() < 1e-5


def dropout_masks():
    with samestep.world() as world:
        model = samestep.replicate(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), world)
        return (model(torch.ones(1, 8)) == 0).tolist()


def test_dropout_draws_its_own_mask_on_every_rank(two_ranks):
    first, second = two_ranks(dropout_masks)
    assert first != second


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.seldom = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x, both):
        return self.always(x) + (self.seldom(x) if both else 0)


def train_with_unused():
    with samestep.world() as world:
        model = samestep.replicate(Sometimes(), world, find_unused_parameters=True)
        for step in range(3):
            model(torch.ones(2, 1), both=step == 1).sum().backward()
        return model.module.seldom.weight.grad.item()


def test_parameters_left_out_of_some_forwards_are_allowed_when_said(two_ranks):
    assert two_ranks(train_with_unused) == [2.0, 2.0]


def after_the_world():
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(2, 2), world)
        batches = samestep.shards(TensorDataset(torch.ones(2, 2)), world, batch_size=2)
        inside = model(torch.ones(1, 2)).detach()
    refused = []
    for action in (lambda: model(torch.ones(1, 2)), lambda: next(iter(batches))):
        try:
            action()
        except StepError as error:
            refused.append(str(error))
    with torch.no_grad():
        return torch.equal(inside, model(torch.ones(1, 2))), refused


def test_after_the_world_a_replica_still_predicts_but_nobody_trains_on_alone(two_ranks):
    for same, refused in two_ranks(after_the_world):
        assert same
        assert len(refused) == 2
        assert all("the world of 2 ranks is closed" in message for message in refused)


# --- more than one backward, more or fewer parameters ---


def two_backwards(model, x, optimizer):
    first, second = model(x[:, :2]), model(x[:, 2:])
    return [first, second]


def one_twice(model, x, optimizer):
    out = model(x[:, :2])
    return [out, out]


def train_with_several_backwards(forwards):
    """One backward for each loss of a step, in float64; the gradients of all of them count."""
    with samestep.world() as world:
        torch.manual_seed(3)
        model = samestep.replicate(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(22, 4, generator=draw, dtype=torch.float64))
        batches = samestep.shards(data, world, batch_size=6, micro_batch_size=6)
        for _ in range(2):
            for (x,) in batches:
                outputs = forwards(model, x, optimizer)
                for number, out in enumerate(outputs):
                    losses = (out.flatten() - number) ** 2
                    batches.mean(losses).backward(retain_graph=number == 0)
                optimizer.step()
                optimizer.zero_grad()
        return dict(model.state_dict())


@pytest.mark.parametrize("forwards", [two_backwards, one_twice])
def test_every_backward_of_a_step_is_averaged(three_ranks, forwards):
    alone = train_with_several_backwards(forwards)
    for state in three_ranks(train_with_several_backwards, forwards):
        for name, value in state.items():
            assert (value - alone[name]).abs().max() < TOLERANCE, name


def train_with_thawing():
    """Freezes a layer, thaws it, adds one: what transfer learning does."""
    with samestep.world() as world:
        torch.manual_seed(3)
        bare = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        bare[0].requires_grad_(False)
        model = samestep.replicate(bare, world)
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(22, 2, generator=draw, dtype=torch.float64))
        batches = samestep.shards(data, world, batch_size=6)
        for epoch in range(4):
            if epoch == 1:
                bare[0].requires_grad_(True)
            if epoch == 2:
                torch.manual_seed(4)
                bare.append(nn.Linear(4, 1).double())
            if epoch == 3:
                bare[2].requires_grad_(False)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for (x,) in batches:
                batches.mean(model(x).square().sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return dict(model.state_dict())


def test_layers_may_be_frozen_thawed_and_added_after_replicate(three_ranks):
    alone = train_with_thawing()
    for state in three_ranks(train_with_thawing):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            assert (value - alone[name]).abs().max() < TOLERANCE, name


def train_and_look_elsewhere():
    """In the training body, a look at one micro-batch of another loader that is in mid-step."""
    with samestep.world() as world:
        torch.manual_seed(3)
        model = samestep.replicate(nn.Linear(2, 1).double(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(20, 2, generator=draw, dtype=torch.float64))
        batches = samestep.shards(data, world, batch_size=8)
        others = samestep.shards(data, world, batch_size=8, micro_batch_size=1)
        for (x,) in batches:
            peek = iter(others)
            next(peek)
            batches.mean(model(x).square().flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in others:
            break
        ends = world.step.step_ends
        return dict(model.state_dict()), ends


def test_another_loader_in_mid_step_does_not_switch_the_averaging_off(two_ranks):
    alone, _ = train_and_look_elsewhere()
    for state, ends in two_ranks(train_and_look_elsewhere):
        assert ends
        for name, value in state.items():
            assert (value - alone[name]).abs().max() < TOLERANCE, name


# --- copies and larger models ---


def copies():
    with samestep.world() as world:
        model = samestep.replicate(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), world)
        average = copy.deepcopy(model)
        with torch.no_grad():
            average(torch.ones(4, 2))
        try:
            average(torch.ones(4, 2))
        except StepError as error:
            message = str(error)
        saved = io.BytesIO()
        torch.save(model.module, saved)
        return list(average.state_dict()) == list(model.state_dict()), message


def test_a_deep_copy_averages_and_evaluates_but_does_not_train(two_ranks):
    for same_names, message in two_ranks(copies):
        assert same_names
        assert "copy of a replica" in message


def copied_on_the_first_rank():
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(2, 2), world)
        copied = copy.deepcopy(model) if world.is_first else None
        other = samestep.replicate(nn.Linear(2, 2), world)
        return model.number, copied and copied.number, other.number, world.next_id()


def test_a_copy_on_one_rank_does_not_count_ahead(two_ranks):
    assert two_ranks(copied_on_the_first_rank) == [(1, -1, 2, 3), (1, None, 2, 3)]


class Pair(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right


def parent():
    with samestep.world() as world:
        both = Pair(samestep.replicate(nn.Linear(2, 2), world), nn.Linear(2, 2))
        state = both.state_dict()
        for value in state.values():
            value.zero_()
        state["left.weight"] = torch.ones(2, 2)
        both.load_state_dict(state)
        return list(state), both.left.module.weight.tolist()


def test_a_larger_model_saves_and_loads_its_replicas_without_prefixes(two_ranks):
    names = ["left.weight", "left.bias", "right.weight", "right.bias"]
    for found, weight in two_ranks(parent):
        assert sorted(found) == sorted(names)
        assert weight == [[1, 1], [1, 1]]


# --- what is refused ---


def test_dataparallel_is_refused_with_the_replacement():
    with samestep.world() as world, pytest.raises(ModelError, match=r"nn.DataParallel.*samestep.replicate\("):
        samestep.replicate(nn.DataParallel(nn.Linear(2, 2)), world)


def test_wrapping_twice_is_refused():
    with samestep.world() as world, pytest.raises(ModelError, match="wrapped in Replica already"):
        samestep.replicate(samestep.replicate(nn.Linear(2, 2), world), world)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "all frozen"])
def test_a_model_with_nothing_to_train_is_refused(model):
    with samestep.world() as world, pytest.raises(ModelError, match="no trainable parameter"):
        samestep.replicate(model, world)


def test_a_model_on_another_device_is_refused():
    with samestep.world() as world, pytest.raises(DeviceError, match=r"weight is on meta, but rank 0 trains on cpu"):
        samestep.replicate(nn.Linear(2, 2, device="meta"), world)


def test_an_unknown_batchnorm_mode_is_refused():
    with samestep.world() as world, pytest.raises(ModelError, match="batchnorm='global' is unknown"):
        samestep.replicate(nn.Linear(2, 2), world, batchnorm="global")


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(x.view(x.size(0), -1))


def view_of_nothing():
    with samestep.world() as world:
        model = samestep.replicate(Viewing(), world)
        data = TensorDataset(torch.ones(3, 2, 2))
        try:
            for (x,) in samestep.shards(data, world, batch_size=4):
                if len(x) == 0:
                    model(x)
        except EmptyBatchError as error:
            return str(error)


def test_a_model_that_refuses_an_empty_batch_is_told_what_to_write(four_ranks):
    *fed, refused = four_ranks(view_of_nothing)
    assert fed == [None] * 3
    assert refused.startswith("Viewing cannot take an empty batch (cannot reshape tensor of 0 elements into shape [0, ")
    assert "and rank 3 has no sample in this micro-batch: write x.flatten(1) instead of x.view(x.size(0)" in refused
    assert ". " not in refused


class Noisy(Viewing):
    """Draws random numbers and counts its forwards, which a trial must not change."""

    def __init__(self, *, flat):
        super().__init__()
        self.norm, self.flat = nn.BatchNorm1d(4), flat
        self.register_buffer("forwards", torch.zeros(()))
        self.calls = 0

    def forward(self, x, other=None):
        self.calls += 1
        self.forwards += 1
        x = x.flatten(1) if self.flat else x.view(x.size(0), -1)
        return self.head(F.dropout(self.norm(x))) if other is None else x @ other


def step_before_an_empty_batch(flat, samples):
    with samestep.world() as world:
        model = samestep.replicate(Noisy(flat=flat), world)
        drawn = torch.get_rng_state()
        try:
            for number, (x,) in enumerate(
                samestep.shards(TensorDataset(torch.ones(samples, 2, 2)), world, batch_size=8)
            ):
                if number == 0:
                    model.train()(x)
                    expected = torch.get_rng_state()
                    torch.set_rng_state(drawn)
                    F.dropout(torch.ones(2, 4))
                    return model.module.calls, int(model.module.forwards), torch.equal(expected, torch.get_rng_state())
        except EmptyBatchError as error:
            return str(error)


def test_an_empty_batch_is_tried_at_the_first_step_and_the_trial_leaves_no_trace(four_ranks):
    refused = four_ranks(step_before_an_empty_batch, False, 10)
    assert len(set(refused)) == 1
    assert "), and the last step of an epoch has 2 samples for 4 ranks: write x.flatten(1)" in refused[0]
    assert four_ranks(step_before_an_empty_batch, False, 12) == [(1, 1, True)] * 4  # none is empty
    assert four_ranks(step_before_an_empty_batch, True, 10) == [(1, 1, True)] * 4


def test_nothing_is_concluded_from_a_model_that_cannot_be_tried():
    x, matrix = torch.ones(4, 2, 2), torch.ones(4, 4)
    assert isinstance(try_empty(Noisy(flat=False), (x,), {}, 4, x.device), RuntimeError)
    assert try_empty(Noisy(flat=False), (x, matrix), {}, 4, x.device) is None  # the matrix is as long as the batch
    uncopied = Noisy(flat=False)
    uncopied.lock = threading.Lock()
    assert try_empty(uncopied, (x,), {}, 4, x.device) is None


def step_in_mid_step():
    with samestep.world() as world:
        model = samestep.replicate(nn.Linear(1, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.ones(8, 1))
        batches = samestep.shards(data, world, batch_size=8, micro_batch_size=2)
        try:
            for (x,) in batches:
                batches.mean(model(x).flatten()).backward()
                optimizer.step()
        except StepError as error:
            return str(error)


def one_sample_each(virtual, micro=None, size=6):
    with samestep.world(virtual_ranks=virtual) as world:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model = samestep.replicate(model, world, batchnorm="local")
        data = TensorDataset(torch.ones(size + 2, 2))
        batches = samestep.shards(data, world, batch_size=size, micro_batch_size=micro)
        try:
            for (x,) in batches:
                batches.mean(model(x).square().sum(1)).backward()
        except DataError as error:
            return str(error)
        return None


def test_one_sample_for_batchnorm_is_told_with_the_step_and_what_to_do(two_ranks):
    begin = "input of torch.Size([1, 3]): step 1 of epoch 0 has 2 samples for 2"
    end = "the last and short one: samestep.shards(…, drop_last=True) leaves it out, or take a batch_size that leaves"
    for kind, virtual in [("rank", None), ("virtual rank", 2)]:
        texts = two_ranks(one_sample_each, virtual)
        assert texts[0] == texts[1]
        assert f"the statistics of each {kind} by itself" in texts[0]
        assert f"{begin} {kind}s, {end} none, or at least 4 samples" in texts[0]
    assert "for 2 ranks: take a batch_size of at least 4" in two_ranks(one_sample_each, None, None, 2)[0]
    assert "in micro-batches of at most 1: take a larger micro_batch_size" in two_ranks(one_sample_each, None, 1)[0]


def test_an_optimizer_step_in_mid_step_is_refused(two_ranks):
    assert all("put optimizer.step() and zero_grad() under" in said for said in two_ranks(step_in_mid_step))


def loss_of_ones_own():
    with samestep.world() as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = samestep.replicate(nn.Linear(1, 1), world)
        batches = samestep.shards(TensorDataset(torch.ones(9, 1)), world, batch_size=3)
        for (x,) in batches:
            model(x).mean().backward()
        return [(str(warning.message), warning.filename) for warning in caught]


def test_a_loss_that_did_not_come_from_mean_is_warned_of_once(two_ranks):
    for messages in two_ranks(loss_of_ones_own):
        ((message, file),) = messages
        assert "did not come from batches.mean" in message
        assert file == __file__  # its own `for`


def unused():
    with samestep.world() as world:
        model = samestep.replicate(Sometimes(), world)
        try:
            for _ in range(2):
                model(torch.ones(2, 1), both=False).sum().backward()
        except ModelError as error:
            return str(error)


def test_unused_parameters_are_refused_with_samesteps_own_remedy(two_ranks):
    assert all("samestep.replicate(model, world, find_unused_parameters=True)" in said for said in two_ranks(unused))


def kept(options):
    """Returns how many outputs of earlier steps are still there, and whether the model is after its world."""
    with samestep.world() as world:
        module = nn.Linear(4, 4)
        model = samestep.replicate(module, world, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for _ in range(4):
            output = model(torch.ones(2, 4))
            outputs.append(weakref.ref(output))
            output.sum().backward()
            optimizer.step()
            del output
        gc.collect()
        left = sum(output() is not None for output in outputs[:-1])
        module = weakref.ref(module)
    del model, optimizer, world
    gc.collect()
    return left, module() is not None


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"reduce": "gloo"}, {"reduce": "ordered"}, {"compress": "int8"}]
)
def test_nothing_is_kept_of_earlier_steps_nor_of_a_world_that_is_closed(options, two_ranks):
    assert two_ranks(kept, options) == [(0, False)] * 2


def backwards_of_two_forwards(find_unused):
    with samestep.world() as world:
        torch.manual_seed(0)
        parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        parts.forward = lambda x, name: parts[name](x)
        model = samestep.replicate(parts, world, find_unused_parameters=find_unused)
        first, second = model(torch.ones(2, 4), "a"), model(torch.ones(2, 4), "b")
        second.sum().backward()
        first.sum().backward()
        return [parameter.grad.tolist() for parameter in parts.parameters()]


def test_each_of_two_forwards_has_its_backward_where_parameters_are_unused(two_ranks):
    assert two_ranks(backwards_of_two_forwards, True) == [[[[2.0] * 4] * 4, [2.0] * 4] * 2] * 2
