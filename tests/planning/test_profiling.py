"""Real scripts, run and measured: what they are made of is known by hand, and what they take adds up."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from samestep.cli import main
from samestep.errors import UsageError
from samestep.launch.start.prefork_server import PreforkServer
from samestep.planning import build_profile
from samestep.planning import profile_script as profiling
from samestep.planning.profile import Profile, load
from samestep.planning.profile_script import profile_script
from samestep.planning.step_trace import StepTrace, Timestamp

MLP = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(240, 32), torch.randint(0, 10, (240,))), batch_size=24)
    for epoch in range(int(sys.argv[1])):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    print("trained to the end")
"""

CNN = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
            self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8 * 16, 10)
            self.spare = nn.Linear(3, 3)
            self.one.bias.requires_grad_(False)

        def forward(self, x, scale=None):
            x = torch.relu(self.one(x))
            x = nn.functional.max_pool2d(torch.relu(self.norm(self.two(x))), 2)
            return self.head(x.flatten(1))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(100):
        optimizer.zero_grad()
        for x in torch.randn(2, 6, 1, 8, 8):  # two micro-batches
            nn.functional.cross_entropy(model(x=x), torch.zeros(6, dtype=torch.int64)).backward()
        optimizer.step()
"""

TIED = """
    import torch
    from torch import nn

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            return self.head(self.blocks(self.tokens(ids)))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(100):
        ids = torch.randint(0, 50, (8, 12))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

OURS = """
    import samestep, torch
    from torch import nn

    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    with samestep.world() as world:
        model = samestep.replicate(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(data, world, batch_size=16, micro_batch_size=4, seed=0)
        for epoch in range(20):
            for x, y in batches:
                batches.mean(nn.functional.cross_entropy(model(x), y, reduction="none")).backward()
                if batches.step_ends:
                    optimizer.step(); optimizer.zero_grad()
"""

DDP = """
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):  # so few that all is made of what there is
        optimizer.zero_grad()
        model(torch.randn(12, 8)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""

GAN = """
    import torch
    from torch import nn

    class Maker(nn.Sequential): pass
    class Judge(nn.Sequential): pass

    maker = Maker(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    judge = Judge(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    makers, judges = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    for step in range(40):
        real, made = torch.randn(10, 2), maker(torch.randn(10, 4))
        judges.zero_grad()
        (judge(made.detach()).mean() - judge(real).mean()).backward()
        judges.step()
        makers.zero_grad()
        (-judge(made).mean()).backward()
        makers.step()
"""

CLOSURE = """
    import copy, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(9, 8), torch.randint(0, 2, (9,))
    for step in range(20):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
        torch.save(model, "whole.pt")
        torch.load("whole.pt", weights_only=False)(x)
        copy.deepcopy(model).eval()(x)
"""

FUNCTIONAL = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        x = torch.randn(16, 32)
        slope = torch.func.grad(lambda v: model(v).sum())(x)
        optimizer.zero_grad()
        (model(x).square().mean() + 0 * slope.sum()).backward()
        optimizer.step()
"""

Measure = Callable[..., Profile]


def step(**milliseconds: float) -> StepTrace:
    """A step whose pieces take so long, in their order."""
    pieces, now = [], 0
    for name, length in milliseconds.items():
        pieces.append((name.rstrip("_"), Timestamp(now)))
        now += round(1e6 * length)
    return StepTrace(pieces, Timestamp(now), passes=1)


@pytest.mark.parametrize("forwards", [(1, 2, 3), (3, 1, 1), (1, 9, 9)])
def test_parts_add_up_to_the_median_step_and_keep_their_names(forwards: tuple[int, ...]) -> None:
    steps = [
        step(train=1, data=2 + n, train_=1, forward=long, backward=6 - n, optimizer=1, evaluate=5 if n == 2 else 0)
        for n, long in enumerate(forwards)
    ]
    parts, seconds = build_profile._medians(steps)
    assert sum(parts.values()) == pytest.approx(statistics.median(seconds), rel=1e-12)
    assert parts["backward"] <= 0.005
    assert parts["other"] > 0


def test_a_gradient_is_ready_at_a_part_of_all_backward_passes_of_its_step() -> None:
    pieces = [
        ("forward", Timestamp(0)),
        ("backward", Timestamp(10)),
        ("forward", Timestamp(20)),
        ("backward", Timestamp(30)),
    ]
    seen = StepTrace(pieces, Timestamp(60), 2, {1: (1, Timestamp(15)), 2: (2, Timestamp(45)), 3: (2, Timestamp(99))})
    assert seen.ready_fractions() == {1: 5 / 40, 2: 25 / 40, 3: 1.0}


def check_times(profile: Profile) -> None:
    """What every profile must be."""
    parts = (profile.data_s, profile.forward_s, profile.backward_s, profile.optimizer_s, profile.other_s)
    assert profile.step_low_s <= sum(parts) * 1.0001
    assert sum(parts) <= profile.step_high_s * 1.0001
    ready = [one.ready_s for one in profile.gradients]
    assert all(one <= other for one, other in pairwise(ready))
    assert 0 <= ready[0] <= ready[-1] <= profile.backward_s
    assert profile.batch in [one.samples for one in profile.sizes]
    whole = next(one for one in profile.sizes if one.samples == profile.batch)
    assert (whole.forward_s, whole.backward_s) == (profile.forward_s, profile.backward_s)


def test_an_mlp_is_what_it_is_by_hand(measure: Measure) -> None:
    profile = measure(MLP, "1000")
    check_times(profile)
    assert (profile.batch, profile.steps, profile.uncut) == (24, 5, None)
    parameters = 4 * (32 * 64 + 64 + 64 * 10 + 10)
    assert profile.parameter_bytes == parameters == sum(one.nbytes for one in profile.gradients)
    assert profile.buffer_bytes == 0
    assert profile.optimizer_bytes == 2 * parameters + 4 * 4  # two moments, and a number of steps for each parameter
    inputs, hidden, logits, targets, weight = 24 * 32 * 4, 24 * 64 * 4, 24 * 10 * 4, 24 * 8, 4
    assert profile.activation_bytes == inputs + hidden + logits + targets + weight
    assert {one.name for one in profile.gradients[:2]} == {"2.weight", "2.bias"}
    assert [one.samples for one in profile.sizes] == [1, 3, 6, 12, 24]
    assert list(profile.layers) == [24, 12, 6, 3]
    for samples, layers in profile.layers.items():
        assert [one.name for one in layers] == ["0", "1", "2"]
        assert sum(one.parameters for one in layers) == parameters
        assert layers[0].saved == samples * 32 * 4
        assert layers[1].activations == samples * 64 * 4
    assert profile.data_s > 0
    assert "thread" in profile.machine


def test_a_cnn_with_batchnorm_and_micro_batches_says_why_it_is_not_cut(measure: Measure) -> None:
    profile = measure(CNN)
    check_times(profile)
    assert profile.batch == 12
    assert {6, 12} <= {one.samples for one in profile.sizes}
    assert profile.layers == {}
    assert profile.uncut is not None
    assert profile.uncut.startswith("layer ")
    assert profile.uncut.endswith("those of a micro-batch and not of the batch")
    used = {"head.weight", "head.bias", "norm.weight", "norm.bias", "two.weight", "two.bias", "one.weight"}
    assert {one.name for one in profile.gradients} == used
    assert {one.name for one in profile.gradients[:2]} == {"head.weight", "head.bias"}
    frozen, spare = 4 * 4, 4 * (9 + 3)
    assert sum(one.nbytes for one in profile.gradients) == profile.parameter_bytes - frozen - spare
    assert profile.buffer_bytes == 8 * 4 * 2 + 8
    assert profile.optimizer_bytes == sum(one.nbytes for one in profile.gradients)


def test_a_tied_weight_has_one_gradient_which_is_ready_last(measure: Measure) -> None:
    profile = measure(TIED)
    check_times(profile)
    names = [one.name for one in profile.gradients]
    assert names.count("tokens.weight") == 1
    assert "head.weight" not in names
    assert names[-1] == "tokens.weight"
    assert sum(one.nbytes for one in profile.gradients) == profile.parameter_bytes
    assert profile.batch == 8
    assert len(profile.layers[8]) > 3
    assert profile.layers[8][0].name.startswith("tokens")


def test_a_script_with_samestep_has_its_global_batch(measure: Measure) -> None:
    profile = measure(OURS)
    check_times(profile)
    assert profile.batch == 16
    assert [one.samples for one in profile.sizes] == [1, 2, 4, 16]
    assert [one.name for one in profile.layers[4]] == ["0", "1", "2"]
    assert sum(one.nbytes for one in profile.gradients) == profile.parameter_bytes
    assert {one.name for one in profile.gradients} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_checkpoints_of_a_training_are_left_alone(measure: Measure, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    profile = measure(
        """
        import samestep, torch

        with samestep.world() as world:
            model = samestep.replicate(torch.nn.Linear(4, 2), world)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = samestep.shards([torch.ones(4)] * 64, world, batch_size=8)
            state = samestep.checkpoint("kept", world, every=1, model=model, optimizer=optimizer, data=batches)
            for epoch in state.epochs(9):
                for x in batches:
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()
        """
    )
    assert profile.batch == 8
    assert not (tmp_path / "kept").exists()


def test_a_ddp_script_that_ends_early_is_measured_on_what_there_is(measure: Measure) -> None:
    profile = measure(DDP)
    check_times(profile)
    assert (profile.batch, profile.steps) == (12, 5)
    assert {one.name for one in profile.gradients} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert sum(one.parameters for one in profile.layers[12]) == profile.parameter_bytes


def test_of_two_models_all_gradients_are_seen_and_none_is_cut(measure: Measure) -> None:
    profile = measure(GAN)
    assert profile.batch == 10
    assert profile.parameter_bytes == 4 * (4 * 8 + 8 + 8 * 2 + 2 + 2 * 8 + 8 + 8 + 1)
    assert sum(one.nbytes for one in profile.gradients) == profile.parameter_bytes
    assert {one.name.partition(".")[0] for one in profile.gradients} == {"Maker", "Judge"}
    assert (profile.sizes, profile.layers) == ((), {})
    assert profile.uncut is not None
    assert "2 models" in profile.uncut
    judged = [one.ready_s for one in profile.gradients if one.name.startswith("Judge")]
    assert max(judged) < max(one.ready_s for one in profile.gradients)  # not where the maker's backward comes by


def test_an_optimizer_that_calls_a_closure_again_and_again_trains_on_one_batch(
    measure: Measure, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = measure(CLOSURE)
    check_times(profile)
    assert profile.batch == 9
    assert [one.samples for one in profile.sizes] == [2, 4, 9]  # batch norm stands no single sample
    assert profile.uncut is not None
    assert profile.uncut.startswith("layer 1 has a BatchNorm1d")


def test_a_script_that_must_not_meet_hooks_of_autograd_meets_none(measure: Measure) -> None:
    profile = measure(FUNCTIONAL)
    check_times(profile)
    assert profile.activation_bytes == 4 * 16 * (32 + 64)  # of the model alone


def test_a_module_is_run_as_python_does_and_progress_is_told(
    nursery: PreforkServer, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(textwrap.dedent(MLP), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    profile = profile_script(
        "package.train", ["1000"], is_module=True, steps=3, fork_server=nursery, progress=said.append
    )
    assert (profile.script, profile.steps) == ("-m package.train 1000", 3)
    assert said[0] == "starting package.train"


def test_the_command_profiles_a_module_for_as_many_steps_as_asked_for_and_keeps_the_profile(
    nursery: PreforkServer, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(textwrap.dedent(MLP), encoding="utf-8")
    (tmp_path / "cluster.toml").write_text(
        '[nodes]\ncount = 2\n[links]\nbetween = { latency = "5 us", bandwidth = "10 GB/s" }', encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "profile_script", partial(profile_script, fork_server=nursery))
    words = ["--cluster", "cluster.toml", "--steps", "4", "--save-profile", "kept.json", "-m", "package.train", "1000"]
    assert main(["plan", *words]) == 0
    kept = load(tmp_path / "kept.json")
    assert (kept.script, kept.steps) == ("-m package.train 1000", 4)
    said = capsys.readouterr().out
    assert main(["plan", "--cluster", "cluster.toml", "--profile", "kept.json"]) == 0
    assert capsys.readouterr().out == said


FAILS = """
    import torch
    model = torch.nn.Linear(2, 2)
    raise ValueError("no such data")
"""

STEPLESS = "print('nothing is trained here')"

SPAWNS = """
    import torch
    def work(rank): pass
    if __name__ == "__main__":
        torch.multiprocessing.spawn(work, nprocs=2)
"""

BARE = """
    import torch
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(30):
        optimizer.zero_grad(); weight.square().sum().backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "args", "said"),
    [
        (FAILS, (), r"train\.py fails by itself at .*train\.py:4: ValueError: no such data"),
        ("import sys; sys.exit(3)", (), r"train\.py fails by itself.*3"),
        (STEPLESS, (), r"train\.py takes no step of an optimizer of torch\.optim"),
        (MLP.replace("loader:", "list(loader)[:3]:"), ("1",), r"ends after 3 steps: a profile takes 4 or more"),
        (SPAWNS, (), r"train\.py starts its own ranks"),
        (BARE, (), r"cannot determine the batch size"),
    ],
    ids=["fails", "exits", "stepless", "short", "spawns", "unwrap"],
)
def test_what_cannot_be_profiled_is_said_in_a_line(
    measure: Measure, source: str, args: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        measure(source, *args)
    assert "\n" not in str(refused.value)


def test_what_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no script .*train\.py: check the path"):
        profile_script(tmp_path / "train.py")
    with pytest.raises(UsageError, match="there is no module nowhere"):
        profile_script("nowhere", is_module=True)
    with pytest.raises(UsageError, match="steps=2: the median of 3 or more is taken"):
        profile_script(__file__, steps=2)
