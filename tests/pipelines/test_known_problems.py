"""The traps of PyTorch's pipelines, one by one: here each ends in the result of one process, or in an error's name.

The numbers are those of the list that was measured on torch 2.13 (gloo, CPU), where all but 7 and 8 are silent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import DataError, ModelError
from samestep.pipelines.pipeline import Pipeline
from samestep.schedule.algorithms import ONE_STAGE_PER_RANK, SCHEDULE_NAMES
from samestep.testing import assert_same_bits

IGNORED = -100
SECONDS = 5.0  # from the begin of a step to its end, right or wrong


class Counts(nn.Module):
    """Statistics of its own, and how often it was called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Chosen(nn.Module):
    """Gives whole numbers: nobody wants their gradients."""

    def forward(self, x):
        return x.argmax(1)


class Functional(nn.Module):
    """Dropout as a function, which torch.export leaves on in evaluation."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = F.dropout(torch.tanh(self.first(x)), 0.5, training=self.training)
        return self.third(F.dropout(self.second(x), 0.5, training=self.training))


class Deciding(nn.Module):
    """Looks at values, which torch.export cannot follow: a module of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = self.linear(x)
        return x if x.sum() > 0 else -x


class Decides(nn.Module):
    """Looks at values in the model's own forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else self.second(-x)


class Contains(nn.Module):
    """A module that decides, between others."""

    def __init__(self):
        super().__init__()
        self.first, self.deciding, self.last = nn.Linear(6, 6), Deciding(), nn.Linear(6, 4)

    def forward(self, x):
        return self.last(self.deciding(self.first(x)))


class Rotary(nn.Module):
    """A block of today's language models: RMSNorm, grouped heads with rotary positions, SwiGLU."""

    def __init__(self, width=8, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.norm, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.each, bias=False) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(width, 12), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        h = self.norm(x)
        q = self.turned(self.q(h).view(b, t, self.heads, self.each).transpose(1, 2), cos, sin)
        k = self.turned(self.k(h).view(b, t, self.groups, self.each).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, t, self.groups, self.each).transpose(1, 2)
        k, v = (one.repeat_interleave(self.heads // self.groups, dim=1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    @staticmethod
    def turned(x, cos, sin):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Llama(nn.Module):
    """Tokens in, scores out; the embedding is the head's weight too."""

    def __init__(self):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(12, 8), nn.ModuleList(Rotary() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("speeds", 1.0 / 100 ** torch.arange(1.0), persistent=False)

    def forward(self, x):
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.speeds[None, :]
        cos, sin = angles.cos(), angles.sin()
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.head(self.norm(h)).flatten(0, 1)


class Skips(nn.Module):
    """Ways over several stages: what comes in, and what the first layer gives, are wanted at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        first = torch.tanh(self.first(x))
        return self.last(torch.relu(self.third(torch.tanh(self.second(first)))) + first) + x


def chain(*between):
    return lambda: nn.Sequential(
        nn.Linear(6, 6), *(one() for one in between), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)
    )


def of_tokens(outputs, targets):
    return F.cross_entropy(outputs, targets.flatten())


@dataclass(frozen=True)
class Case:
    """A model and its batch; `ends` by number of stages, or None where a plan says."""

    make: Any
    ends: Any = None
    samples: int = 8
    micro_batches: int = 4
    loss_fn: Any = F.cross_entropy
    inputs: str = "numbers"
    frozen: tuple[str, ...] = ()
    stages: int = 2


CASES = {
    "2 no forward beside those of the step": Case(chain(Counts), {1: (5,), 2: (3, 5)}),
    "3 dropout is drawn as by one process": Case(chain(lambda: nn.Dropout(0.5)), {1: (5,), 2: (3, 5)}),
    "4 inputs that want no gradient": Case(
        lambda: nn.Sequential(nn.Linear(6, 6), Chosen(), nn.Embedding(6, 6), nn.Linear(6, 4)), {1: (4,), 2: (2, 4)}
    ),
    "4 a frozen stage": Case(chain(nn.Tanh), {1: (5,), 2: (2, 5)}, frozen=("0.weight", "0.bias")),
    "5 dropout is off in evaluation": Case(Functional),
    "7 a batch of 10 in 4": Case(chain(nn.Tanh), {1: (5,), 2: (2, 5)}, samples=10),
    "8 a module that decides by values": Case(Contains),
    "8 rotary positions": Case(Llama, loss_fn=of_tokens, inputs="tokens"),
    "9 three micro-batches": Case(chain(nn.Tanh), {1: (5,), 2: (2, 5)}, micro_batches=3),
    "9 fewer micro-batches than stages": Case(chain(nn.Tanh), {1: (5,), 2: (2, 5)}, micro_batches=1),
    "10 skips over three stages": Case(Skips, loss_fn=F.mse_loss, inputs="itself", stages=3),
}


def batch(inputs, samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if inputs == "tokens":
        return tuple(torch.randint(0, 12, (samples, 5), generator=generator) for _ in range(2))
    x = torch.randn(samples, 6, generator=generator)
    return x, x.roll(1, 1) if inputs == "itself" else torch.randint(0, 4, (samples,), generator=generator)


def taken(name, stages, schedule, ranks=None):
    """Losses, gradients, norms, outputs and state of two steps; and the seconds that each call took.

    On as many ranks as there are stages, or on one that computes several stages.
    """
    case, seconds = CASES[name], []
    devices = ["cpu"] * stages if ranks == 1 else None

    def timed(call, *given):
        begin = time.monotonic()
        found = call(*given)
        seconds.append(time.monotonic() - begin)
        return found

    with samestep.world(pipeline=ranks or stages, device="cpu") as world:
        torch.manual_seed(0)
        whole, given = case.make(), batch(case.inputs, case.samples)
        for frozen in case.frozen:
            whole.get_parameter(frozen).requires_grad_(False)
        if case.ends is None:
            options = {"stages": stages, "schedule": schedule, "micro_batches": case.micro_batches, "repeats": 1}
            plan = samestep.plan_pipeline(whole, given, case.loss_fn, **options)
            stage = samestep.pipeline(whole, world, plan, devices=devices)
        else:
            options = {"schedule": schedule, "micro_batches": case.micro_batches, "devices": devices}
            stage = Pipeline(whole, world, case.loss_fn, ends=case.ends[stages], **options)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
        found = {}
        for step in range(2):
            found[f"loss {step}"] = timed(stage.step, batch(case.inputs, case.samples, step))
            found |= {
                f"{key} {step}": one.grad.clone() for key, one in stage.named_parameters() if one.grad is not None
            }
            found[f"norm {step}"] = samestep.clip_grad_norm_(stage, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        stage.eval()
        found["outputs"], again = timed(stage, *given[:-1]), timed(stage, *given[:-1])
        assert torch.equal(found["outputs"], again)
        return found | {f"state {key}": one for key, one in stage.whole_state_dict().items()}, seconds


@cache
def undivided(name):
    """The same on one rank with one stage."""
    found, _ = taken(name, 1, "1f1b")
    return found


def check(name, results):
    expected = undivided(name)
    for found, _ in results:
        assert_same_bits(found, {key: expected[key] for key in found})
    assert {key for found, _ in results for key in found} == expected.keys()
    if "state 1.calls" in expected:
        assert int(expected["state 1.calls"]) == 2 * CASES[name].micro_batches
    return [one for _, seconds in results for one in seconds]


ON_RANKS = ["4 inputs that want no gradient", "9 fewer micro-batches than stages", "10 skips over three stages"]
IN_ONE_PROCESS = [
    "2 no forward beside those of the step",
    "5 dropout is off in evaluation",
    "8 a module that decides by values",
    "8 rotary positions",
]


@pytest.mark.parametrize(
    "name", [name if name in IN_ONE_PROCESS else pytest.param(name, marks=pytest.mark.prove) for name in CASES]
)
def test_a_trap_ends_in_the_bits_of_one_stage(name):
    found = taken(name, CASES[name].stages, "zero-bubble", ranks=1)
    check(name, [found])


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.prove)])
@pytest.mark.parametrize(
    "name", [name if name in ON_RANKS else pytest.param(name, marks=pytest.mark.prove) for name in CASES]
)
def test_a_trap_ends_in_the_bits_of_one_process(two_ranks, three_ranks, name, schedule):
    stages = CASES[name].stages
    check(name, {2: two_ranks, 3: three_ranks}[stages](taken, name, stages, schedule))


# --- 1: replicas ---------------------------------------------------------------------------------

ENDS = {"interleaved": (1, 2, 4, 5)}


def replicated(schedule):
    """Three steps of two replicas of two stages."""
    with samestep.world(pipeline=2) as world:
        torch.manual_seed(0)
        whole = chain(nn.Tanh)().double()
        stage = Pipeline(whole, world, F.cross_entropy, ends=ENDS.get(schedule, (2, 5)), schedule=schedule)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
        seconds = []
        for step in range(3):
            x, y = batch("numbers", 7 + world.data.rank, 2 * step + world.data.rank)
            begin = time.monotonic()
            stage.step((x.double(), y))
            seconds.append(time.monotonic() - begin)
            optimizer.step()
            optimizer.zero_grad()
        return stage.whole_state_dict(), seconds


@pytest.mark.parametrize(
    "schedule",
    [
        name if name in {"1f1b", "interleaved"} else pytest.param(name, marks=pytest.mark.prove)
        for name in SCHEDULE_NAMES
    ],
)
def test_1_replicas_stay_alike_and_take_the_step_of_one_process(four_ranks, schedule):
    torch.manual_seed(0)
    whole = chain(nn.Tanh)().double()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, y = (torch.cat(each) for each in zip(*(batch("numbers", 7 + r, 2 * step + r) for r in (0, 1)), strict=True))
        F.cross_entropy(whole(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    (first, _), *others = four_ranks(replicated, schedule)
    for other, _ in others:
        assert_same_bits(other, first)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-12, atol=1e-14)


# --- 6: means of unlike micro-batches -------------------------------------------------------------


def counted(targets):
    return (targets != IGNORED).sum()


def padded(seed=0):
    x, y = batch("numbers", 12, seed)
    return x.double(), y.masked_fill(torch.arange(12) % 3 < seed % 3, IGNORED).masked_fill(
        torch.arange(12) > 8, IGNORED
    )


LOSSES = {
    "a mean of what counts": (F.cross_entropy, counted, True),
    "all losses": (lambda o, y: F.cross_entropy(o, y, reduction="none"), counted, True),
    "a mean, without a weight": (F.cross_entropy, None, False),
    "a sum": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), None, False),
    "contrasts among samples": (lambda o, _: F.cross_entropy(o @ o.T, torch.arange(len(o))), None, False),
}


def weighed(over):
    """By loss: gradients of a padded batch, or what is said of it, and the seconds; in a loop over shards or not."""
    found = {}
    with samestep.world(pipeline=2) as world:
        for name, (loss_fn, weight, _) in LOSSES.items():
            torch.manual_seed(0)
            whole = chain(nn.Tanh)().double()
            known = weight if over == "steps" else None
            plan = samestep.plan_pipeline(whole, padded(), loss_fn, micro_batches=4, weight=known, repeats=1)
            stage = samestep.pipeline(whole, world, plan)
            batches = [padded()]
            if over == "shards":
                of = None if weight is None else lambda given, weight=weight: weight(given[1])
                dataset = torch.utils.data.TensorDataset(*padded())
                batches = samestep.shards(dataset, world, batch_size=12, weight=of, shuffle=False)
            begin = time.monotonic()
            try:
                for each in batches:
                    stage.step(each)
                told = {key: one.grad for key, one in stage.named_parameters()}
            except DataError as error:
                told = str(error)
            found[name] = told, time.monotonic() - begin
    return found


@pytest.mark.parametrize("over", ["steps", "shards"])
def test_6_a_loss_that_is_no_mean_over_samples_is_weighed_or_named(two_ranks, over):
    first, second = two_ranks(weighed, over)
    torch.manual_seed(0)
    whole = chain(nn.Tanh)().double()
    x, y = padded()
    F.cross_entropy(whole(x), y).backward()
    for name, (_, _, is_right) in LOSSES.items():
        (told, _), (other, _) = first[name], second[name]
        if not is_right:
            assert told == other
            assert told.startswith("the loss of the 6 samples is ")
            assert "give shards or plan_pipeline weight=, which counts the items that the loss is a mean of" in told
            continue
        assert {**told, **other}.keys() == dict(whole.named_parameters()).keys()
        for key, one in {**told, **other}.items():
            torch.testing.assert_close(one, whole.get_parameter(key).grad, rtol=1e-12, atol=1e-14)


class Mixes(nn.Module):
    """Gives a sample something else beside other samples."""

    def forward(self, x):
        return x - x.mean(0)


class Turns(nn.Module):
    """Time first, as recurrent layers have it: dim 0 does not run over the samples."""

    def forward(self, x):
        return x.view(-1, 2, 2).transpose(0, 1)


def noisy(outputs, targets):
    return F.cross_entropy(outputs + torch.randn_like(outputs), targets)


@pytest.mark.parametrize(
    ("last", "loss_fn"),
    [
        (nn.Tanh, F.cross_entropy),
        (nn.Tanh, noisy),
        (Mixes, F.cross_entropy),
        (Turns, lambda o, y: F.cross_entropy(o.transpose(0, 1), y[:, None] % 2 + torch.tensor([[0, 0]]))),
    ],
)
def test_6_a_loss_that_cannot_be_compared_is_not_suspected(last, loss_fn):
    whole = chain(nn.Tanh)().append(last())
    plan = samestep.plan_pipeline(whole, batch("numbers", 8), loss_fn, micro_batches=2, repeats=1)
    assert plan.loss_warning is None


# --- 2 and 8: refused by name ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            chain(lambda: nn.BatchNorm1d(6)),
            "layer 1 has a BatchNorm1d, whose statistics would be those of a micro-batch",
        ),
        (
            Decides,
            r"Decides decides by the values of a tensor at .*test_known_problems.py:\d+  return self.second\(x\) if x",
        ),
    ],
)
def test_2_and_8_what_cannot_be_right_is_refused(make, said):
    with pytest.raises(ModelError, match=said):
        samestep.plan_pipeline(make(), batch("numbers", 8), F.cross_entropy, repeats=1)


# --- all of them, in seconds -----------------------------------------------------------------------


@pytest.mark.prove
def test_every_trap_is_over_within_seconds(two_ranks, three_ranks, four_ranks, capsys):
    found = {}
    for name, case in CASES.items():
        run = {2: two_ranks, 3: three_ranks}[case.stages]
        found[name] = max(max(check(name, run(taken, name, case.stages, schedule))) for schedule in ONE_STAGE_PER_RANK)
    found |= {f"1 {name}": max(max(seconds) for _, seconds in four_ranks(replicated, name)) for name in SCHEDULE_NAMES}
    for over in ("steps", "shards"):
        for results in two_ranks(weighed, over):
            for name, (_, seconds) in results.items():
                found[f"6 {name}"] = max(found.get(f"6 {name}", 0.0), seconds)
    with capsys.disabled():
        print("\n" + "\n".join(f"{seconds:8.3f} s  {name}" for name, seconds in found.items()))
    assert max(found.values()) < SECONDS
