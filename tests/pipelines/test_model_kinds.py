"""Stages that people have made by hand, and models that torch.export has traced, train as they are."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import ModelError, UsageError
from samestep.pipelines.model_chain import build_chain, normalize_model
from samestep.schedule.algorithms import ONE_STAGE_PER_RANK
from samestep.testing import assert_same_bits
from samestep.topology import cut_evenly

HOST = ["cpu", "cpu", "cpu"]


class Encoder(nn.Module):
    """Two inputs; gives what goes on, a way around, and a mask that wants no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, scale):
        h = torch.tanh(self.linear(x)) * scale[:, None]
        return h, x + h, x > 0


class Middle(nn.Module):
    """Hands the way around on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h, skip, mask):
        return self.second(torch.relu(self.first(h))).masked_fill(mask, 0.0), skip


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, h, skip):
        return self.linear(h + skip)


def stages(dtype=torch.float32):
    torch.manual_seed(0)
    return [each.to(dtype) for each in (Encoder(), Middle(), Decoder())]


def batch(seed=0, samples=10):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(0, 4, (samples,), generator=generator)
    return x, torch.linspace(0.5, 2.0, samples), y


def of(steps, stage):
    """Losses, gradients and outputs, and the state of the whole, of some steps."""
    optimizer, found = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9), {}
    for step in range(steps):
        found[f"loss {step}"] = stage.step(batch(step))
        found |= {f"{name} {step}": each.grad.clone() for name, each in stage.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found["outputs"] = stage(*batch()[:-1])
    return found | {f"state {name}": each for name, each in stage.whole_state_dict().items()}


def by_hand(size, make=stages, devices=None, **options):
    with samestep.world(pipeline=size, device="cpu") as world:
        options = {"loss_fn": F.cross_entropy, "micro_batches": 4} | options
        return of(2, samestep.pipeline(make(), world, devices=devices, **options))


def by_torch(steps):
    """The same with nothing of a pipeline: the stages called one after another."""
    every = nn.ModuleList(stages())
    optimizer, found = torch.optim.SGD(every.parameters(), lr=0.1, momentum=0.9), {}

    def called(x, scale):
        return every[2](*every[1](*every[0](x, scale)))

    for step in range(steps):
        x, scale, y = batch(step)
        total = torch.zeros(1, dtype=torch.float64)
        for begin, end in cut_evenly(len(x), 4):
            loss = F.cross_entropy(called(x[begin:end], scale[begin:end]), y[begin:end]) * ((end - begin) / len(x))
            loss.backward()
            total += loss.detach().double()
        found[f"loss {step}"] = total[0]
        found |= {f"{name} {step}": each.grad.clone() for name, each in every.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"state {name}": each.detach() for name, each in every.state_dict().items()}


def test_stages_by_hand_run_one_a_rank_and_as_they_are(three_ranks):
    expected = by_torch(2)
    outputs = by_hand(1)["outputs"]
    results = three_ranks(by_hand, 3)
    for found in results:
        assert torch.equal(found.pop("outputs"), outputs)
        assert_same_bits(found, {name: expected[name] for name in found})
    assert {name for found in results for name in found} == expected.keys()


@pytest.mark.parametrize("schedule", ONE_STAGE_PER_RANK)
def test_stages_by_hand_run_one_a_device_and_as_they_are(schedule):
    found = by_hand(1, devices=HOST, schedule=schedule)
    assert torch.equal(found.pop("outputs"), by_hand(1)["outputs"])
    assert_same_bits(found, by_torch(2))


def test_one_process_has_the_same_bits_without_devices():
    expected = by_torch(2)
    for found in (by_hand(1), by_hand(1, lambda: nn.ModuleList(stages()))):
        found.pop("outputs")
        assert_same_bits(found, expected)


def planned(size):
    with samestep.world(pipeline=size) as world:
        every = stages()
        plan = samestep.plan_pipeline(
            every, batch(), F.cross_entropy, stages=3, schedule="1f1b", micro_batches=4, repeats=1
        )
        assert (plan.ends, [layer.name for layer in plan.layers]) == ((1, 2, 3), ["0", "1", "2"])
        assert plan.layers[0].activations == 3 * 6 * (4 + 4 + 1)  # three samples: two tensors of float32, one of bool
        return of(2, samestep.pipeline(every, world, plan))


def test_a_plan_measures_them_and_cuts_between_them(three_ranks):
    expected = by_torch(2)
    for found in three_ranks(planned, 3):
        found.pop("outputs")
        assert_same_bits(found, {name: expected[name] for name in found})


def blocks():
    """An nn.Sequential of stages, two of which are made of several layers, with a weight of two of them."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    last = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    last[0].weight = first[0].weight
    return nn.Sequential(first, nn.GELU(), nn.Linear(6, 6), last)


def sequential(size, schedule):
    with samestep.world(pipeline=size) as world:
        stage = samestep.pipeline(blocks(), world, loss_fn=F.cross_entropy, schedule=schedule)
        held = [
            sorted({name.partition(".")[0] for name, _ in part.named_parameters()}) for part in stage.parts.values()
        ]
        assert stage.micro_batches == 16
        x, _, y = batch()
        loss = stage.step((x, y))
        gradients = {name: each.grad.clone() for name, each in stage.named_parameters()}
        return held, {"loss": loss, **gradients}, stage.whole_state_dict()


def test_an_nn_sequential_of_stages_is_cut_between_them(two_ranks, four_ranks):
    """Of four stages on two ranks each has two, in turn."""
    _, expected, state = sequential(1, "1f1b")
    for run, size, schedule, own in (
        (four_ranks, 4, "1f1b", [[["0"]], [[]], [["2"]], [["3"]]]),
        (two_ranks, 2, "interleaved", [[["0"], ["2"]], [[], ["3"]]]),
    ):
        results = run(sequential, size, schedule)
        assert [held for held, _, _ in results] == own
        for _, found, whole in results:
            assert_same_bits(found, {name: expected[name] for name in found})
            assert_same_bits(whole, state)
    blocks().load_state_dict(state)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.second(self.first(x))


def compiled():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it imports
        return torch.compile(Net())


PLAN = {"stages": 2, "micro_batches": 2, "schedule": "1f1b", "repeats": 1}


NO_STAGES = [
    (Net, {}, UsageError, "where is Net to be cut. Plan it: samestep.plan_pipeline.*or give its stages"),
    (stages, {"loss_fn": None}, UsageError, "neither a plan nor a loss: samestep.pipeline.stages, world, loss_fn="),
    (stages, {"schedule": "gpipe", "devices": HOST}, UsageError, "there is no schedule 'gpipe'"),
    (stages, {"devices": HOST[:2]}, UsageError, "2 devices for 3 stages: give one for each"),
    (stages, {"micro_batches": 0}, UsageError, "micro_batches=0: give a whole number, 1 or more"),
    (stages, {"micro_batches": 2, "split_size": 2}, UsageError, "micro_batches=2 and split_size=2: give one of"),
    (
        lambda: [nn.Linear(6, 4), len],
        {},
        ModelError,
        "a builtin_function_or_method is among the stages: give a list",
    ),
    (list, {}, ModelError, "there are no stages: give a list of modules"),
    (lambda: len, {}, ModelError, "a builtin_function_or_method is no model: give an nn.Module, or a list"),
    (compiled, {}, ModelError, "OptimizedModule hides the model's layers: give the model that"),
    (lambda: [nn.BatchNorm1d(6), nn.Linear(6, 4)], {}, ModelError, "layer 0 has a BatchNorm1d, whose statistics"),
]


def test_what_are_no_stages_is_refused():
    with samestep.world() as world:
        for make, options, error, said in NO_STAGES:
            with pytest.raises(error, match=said):
                samestep.pipeline(make(), world, **{"loss_fn": F.cross_entropy, **options})


def test_a_plan_has_its_own_loss():
    net, (x, _, y) = Net(), batch()
    plan = samestep.plan_pipeline(net, (x, y), F.cross_entropy, **PLAN)
    with samestep.world() as world, pytest.raises(UsageError, match="loss_fn, schedule and weight are the plan's"):
        samestep.pipeline(net, world, plan, loss_fn=F.cross_entropy)


def too_many():
    with samestep.world(pipeline=2) as world, pytest.raises(UsageError) as said:
        samestep.pipeline(stages(), world, loss_fn=F.cross_entropy)
    return str(said.value)


def test_more_stages_than_ranks_are_refused(two_ranks):
    assert two_ranks(too_many) == ["3 stages cannot be divided evenly among 2 ranks: give a multiple of 2"] * 2


# --- torch.export ------------------------------------------------------------------------------------


class Drops(Net):
    def forward(self, x):
        return self.second(F.dropout(torch.relu(self.first(x)), 0.5, self.training))


class Attends(Net):
    def forward(self, x):
        h = self.first(x)[:, None, None]
        p = 0.1 if self.training else 0.0
        return self.second(F.scaled_dot_product_attention(h, h, h, dropout_p=p)[:, 0, 0])


class Norms(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def exported(kind, *, training=True, free=True, module=False):
    torch.manual_seed(0)
    shapes = ({0: torch.export.Dim.DYNAMIC},) if free else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.export.export(kind().train(training), (torch.ones(4, 6),), dynamic_shapes=shapes)
        return found.module() if module else found


def trained(kind, *, stages=1, ranks=1, **options):
    devices = ["cpu"] * stages if stages > ranks else None
    with samestep.world(pipeline=ranks, device="cpu") as world:
        torch.manual_seed(0)
        whole, (x, _, y) = kind() if options.get("plain") else exported(kind, **options), batch()
        plan = samestep.plan_pipeline(whole, (x, y), F.cross_entropy, **{**PLAN, "stages": 2})
        stage = samestep.pipeline(whole, world, plan, devices=devices)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        found = {}
        for step in range(2):
            found[f"loss {step}"] = stage.step((x, y))
            optimizer.step()
            optimizer.zero_grad()
        stage.eval()
        found["outputs"] = stage(x)
        return found | stage.whole_state_dict()


@pytest.fixture(scope="module")
def plain():
    """What the model gives that nobody has exported, in one stage."""
    return trained(Net, plain=True)


@pytest.mark.parametrize("options", [{}, {"training": False}, {"module": True}])
def test_what_torch_has_exported_trains_as_the_model_does(plain, options):
    """In both modes, whichever it was exported in; its parameters have the names that they have in the model."""
    assert_same_bits(trained(Net, stages=2, **options), plain)


@pytest.mark.parametrize("options", [{}, {"training": False}, {"module": True}])
def test_its_dropout_is_on_in_training_and_off_in_evaluation(plain, options):
    alone = trained(Drops, **options)
    assert not torch.equal(alone["loss 0"], plain["loss 0"])
    assert_same_bits(trained(Drops, stages=2, **options), alone)
    right = Drops().eval()
    right.load_state_dict({name: each for name, each in alone.items() if "." in name})
    assert torch.equal(torch.cat([right(part) for part in batch()[0].chunk(2)]), alone["outputs"])


def on_two_ranks(options):
    return trained(Drops, stages=2, ranks=2, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.prove),
        pytest.param({"training": False}, marks=pytest.mark.prove),
        {"module": True},
    ],
)
def test_it_trains_on_two_ranks_as_on_one(two_ranks, options):
    alone = trained(Drops, **options)
    for found in two_ranks(on_two_ranks, options):
        assert_same_bits(found, alone)


def test_the_exported_program_stays_as_it_is():
    traced = exported(Drops, module=True)
    before, code = list(traced.state_dict()), traced.code
    made = normalize_model(traced)
    assert (list(traced.state_dict()), traced.code) == (before, code)
    assert [layer.name for layer in build_chain(made, [torch.ones(2, 6)]).layers] == ["first.weight", "second.weight"]
    assert made.get_parameter("first.weight") is traced.get_parameter("first.weight")


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Net, {"free": False}, "x was exported for 4 samples alone, and a micro-batch has fewer: torch.export.export"),
        (Attends, {}, r"scaled_dot_product_attention.* was exported in one mode, and does something else in the other"),
        (Norms, {}, r"batch_norm.* was exported in one mode, and does something else in the other: give the model"),
    ],
)
def test_what_was_exported_for_one_size_or_mode_is_refused(kind, options, said):
    x, _, y = batch()
    with pytest.raises(ModelError, match=said):
        samestep.plan_pipeline(exported(kind, **options), (x, y), F.cross_entropy, **PLAN)
