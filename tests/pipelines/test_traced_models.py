"""Models that are no nn.Sequential are cut where they can be, and stay the same models."""

from __future__ import annotations

import ordinary
import pytest
import torch
from torch import nn

import samestep
from samestep.errors import ModelError
from samestep.pipelines.model_chain import build_chain
from samestep.pipelines.splitting import check_equivalence
from samestep.testing import assert_same_bits

FEW = {"convolutions", "language", "tied", "translator"}  # of the models that are trained; the others in `make prove`


def made(name):
    torch.manual_seed(0)
    model, inputs, layers = ordinary.MODELS[name]
    return model(), inputs, layers


def loss_of(outputs, targets):
    """Of any outputs, the mean of a loss by sample."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((each.flatten(1).double() ** 2).mean(1).mul(targets).mean() for each in outputs)


@pytest.mark.parametrize("name", ordinary.MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_layers_called_one_after_another_are_the_model(name, training):
    """Also those of another rank, which traces the same inputs."""
    model, inputs, layers = made(name)
    model.train(training)
    before = {key: id(value) for key, value in vars(model).items()}
    chain = build_chain(model, inputs)
    again = build_chain(model, inputs)
    assert chain.digest == again.digest
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert layers is None or [each.name for each in chain.layers] == layers
    names = [
        key
        for cut in (chain.extract_stage(0, 2), chain.extract_stage(2, len(chain.layers)))
        for key in cut[0].state_dict()
    ]
    assert sorted(names) == sorted(model.state_dict())
    expected = passed(model, inputs)
    for calls in (chain.layers, again.extract_stage(0, len(again.layers))[1]):
        assert_same_bits(expected, passed(one_after_another(calls), inputs))


def one_after_another(calls):
    def call(*inputs):
        given = inputs if len(inputs) > 1 else inputs[0]
        for each in calls:
            given = each(given)
        return given

    return call


def passed(call, inputs):
    torch.manual_seed(1)
    found = call(*inputs)
    return [each.detach() for each in (found if isinstance(found, tuple) else (found,))]


def test_a_layer_has_the_mode_of_its_module():
    """Dropout that a forward calls as a function is off in evaluation: torch.export's parts leave it on."""
    model, inputs, _ = made("convolutions")
    chain = build_chain(model.train(), inputs)
    part, calls = chain.extract_stage(0, 4)
    call = one_after_another(calls)
    assert not torch.equal(passed(call, inputs)[0], passed(one_after_another(calls), (inputs[0] + 1,))[0])
    torch.manual_seed(0)
    first = call(*inputs)
    assert not torch.equal(first, call(*inputs))
    part.eval()
    assert torch.equal(call(*inputs), call(*inputs))
    assert torch.equal(call(*inputs), model.eval()(*inputs))


def test_blocks_that_are_alike_share_their_times():
    model, inputs, _ = made("residuals")
    chain = build_chain(model, inputs)
    kinds = [layer.signature for layer in chain.layers]
    assert kinds[1:5] == kinds[5:9]
    assert len(set(kinds)) == 7


class Values(nn.Linear):
    def forward(self, x):
        return x if x.sum() > 0 else super().forward(x)


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(6, 6), nn.Linear(6, 5), None

    def forward(self, x):
        self.seen = self.first(x)
        return self.second(self.seen)


class Silent(Keeps):
    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


class Precise(Keeps):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
        return self.second(x.float())


class Auxiliary(Keeps):
    def forward(self, x):
        x = self.first(x)
        if self.training:
            x = torch.tanh(x)
        return self.second(x)


class Dictionary(Keeps):
    def forward(self, x):
        found = {"hidden": self.first(x)}
        return self.second(found["hidden"])


class Named(Keeps):
    def forward(self, x):
        return {"scores": self.second(self.first(x))}


class Several(Keeps):
    def forward(self, x):
        halves = x.chunk(2, 1)
        x = self.first(x)
        return self.second(x) + torch.cat(halves, 1)[:, :5]


class Answers(Keeps):
    def forward(self, x):
        if x.size(0) == 2:
            return self.second(self.first(x))
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            lambda: Values(6, 6),
            r"Values decides by the values of a tensor at .*test_traced_models.py:\d+  return x if x.sum",
        ),
        (Keeps, r"Keeps's forward keeps a value of the batch in self.seen"),
        (Named, "Named gives a dict: in a pipeline a tensor is given, or several in a tuple"),
        (Silent, "gives other values or gradients in training"),
        (Precise, "gives other values or gradients in training"),
        (Auxiliary, r"something else in evaluation than in training, at .*x = torch.tanh\(x\)"),
        (
            Several,
            r"between first and second it cannot be cut, because a tuple would have to be sent: .* x.chunk\(2, 1\)",
        ),
        (Answers, r"decides by a shape, which was True where the model was cut, and is False here"),
    ],
)
def test_what_cannot_be_cut_says_which_line_stands_in_the_way(kind, said):
    batch = torch.randn(8, 6), torch.ones(8)
    model = kind()
    before = dict(vars(model))
    with pytest.raises(ModelError, match=said):
        samestep.plan_pipeline(model, batch, loss_of, micro_batches=1, repeats=1)
    assert vars(model) == before


class Asks(Keeps):
    """Whether there is something left over, how many rows there are, and what lies between the bounds of a range."""

    def forward(self, x):
        x = self.first(x)
        if x.size(1) % 4:
            x = x + len(x[0])
        return self.second(sum(row * number for number, row in enumerate(x.unbind(1)) if row.dim()).unsqueeze(1) + x)


class Rows(Keeps):
    def forward(self, x):
        return self.second(torch.stack([row.flip(0) for row in self.first(x)]))


def test_what_a_forward_asks_is_answered_alike_for_the_same_shapes():
    """A number that stands for yes need not be 1, and a tensor is as long as its dim 0."""
    for kind in (Asks, Rows):
        model, x = kind(), torch.randn(2, 6)
        layers = build_chain(model, [x]).layers
        check_equivalence(model, layers, [x])
    with pytest.raises(ModelError, match=r"decides by a shape, which was 2 where the model was cut, and is 3 here"):
        one_after_another(layers)(torch.randn(3, 6))


def test_a_dictionary_within_a_forward_is_no_obstacle():
    model = Dictionary()
    assert [layer.name for layer in build_chain(model, [torch.randn(2, 6)]).layers] == ["first", "second"]


def test_another_model_than_the_one_that_was_planned_for_is_refused():
    batch = torch.randn(8, 6), torch.ones(8)
    plan = samestep.plan_pipeline(Dictionary(), batch, loss_of, stages=1, micro_batches=1, repeats=1)
    with samestep.world(device="cpu") as world:
        for other in (Answers(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))):
            with pytest.raises(ModelError, match="is not what it was where the plan was made"):
                samestep.pipeline(other, world, plan)


def test_a_model_may_be_cast_after_it_was_planned_for():
    """As samestep verify does, to compare in float64."""
    model, inputs, _ = made("residuals")
    batch = (*inputs, torch.linspace(1, 2, len(inputs[0])))
    plan = samestep.plan_pipeline(model, batch, loss_of, stages=2, micro_batches=1, repeats=1)
    with samestep.world(device="cpu") as world:
        stage = samestep.pipeline(model.double(), world, plan, devices=["cpu", "cpu"])
        assert stage(*(each.double() for each in inputs)).dtype == torch.float64


def test_layers_that_are_other_than_the_model_are_found():
    model, inputs, _ = made("convolutions")
    layers = build_chain(model, inputs).layers
    check_equivalence(model, layers, inputs)
    with pytest.raises(ModelError, match="gives other values"):
        check_equivalence(model, [*layers, nn.Tanh()], inputs)


def trained(name, stages, schedule, ranks):
    model, inputs, _ = made(name)
    batch = (*inputs, torch.linspace(1, 2, len(inputs[0])))
    plan = samestep.plan_pipeline(model, batch, loss_of, stages=stages, schedule=schedule, micro_batches=3, repeats=1)
    with samestep.world(pipeline=ranks, device="cpu") as world:
        stage = samestep.pipeline(model, world, plan, devices=["cpu"] * stages if ranks < stages else None)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(stage.step(batch))
            samestep.clip_grad_norm_(stage, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        stage.eval()
        outputs = stage(*inputs)
        return losses, list(outputs) if isinstance(outputs, tuple) else [outputs], stage.whole_state_dict()


def check_bits(found, expected):
    """The same losses, evaluations and weights, with dropout, whatever was measured and wherever it was cut."""
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.prove) for name in ordinary.MODELS]
)
def test_ordinary_models_train_in_two_stages_as_in_one(name):
    check_bits(trained(name, 2, "zero-bubble", 1), trained(name, 1, "1f1b", 1))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.prove)])
@pytest.mark.parametrize(
    "name", [name if name == "language" else pytest.param(name, marks=pytest.mark.prove) for name in ordinary.MODELS]
)
def test_ordinary_models_train_on_two_ranks_as_on_one(name, schedule, two_ranks):
    alone = trained(name, 1, schedule, 1)
    for found in two_ranks(trained, name, 2, schedule, 2):
        check_bits(found, alone)
