"""`samestep verify` on compressed gradients: what is declared agrees, and what is not as declared is found."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from lazily import Lazily

import samestep
from samestep import Report

TRAIN = """
    import samestep, torch
    from samestep.compress import Int8, PowerSGD, TopK
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(96, 24, generator=generator), torch.randint(0, 5, (96,), generator=generator)
    )
    with samestep.world(seed=1) as world:
        net = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 5))
        model = samestep.replicate(net, world, compress={codec}, buckets=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled={scaled})
        sampler = DistributedSampler(data, world.size, world.rank, shuffle=False)
        for x, y in DataLoader(data, batch_size=16 // world.size, sampler=sampler):
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale({loss}).backward()
            scaler.unscale_(optimizer)
            {between}
            scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
            {behind}
"""
ACCUMULATING = """
    import samestep, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(58, 24, generator=generator), torch.randint(0, 5, (58,), generator=generator)
    with samestep.world(seed=1) as world:
        net = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 5))
        model = samestep.replicate(net, world, compress="int8")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batches = samestep.shards(TensorDataset(x, y), world, batch_size=20, micro_batch_size=4)
        state = samestep.checkpoint("run", world, every=50, model=model, optimizer=optimizer, data=batches)
        for epoch in state.epochs(3):
            for images, labels in batches:
                batches.mean(nn.functional.cross_entropy(model(images), labels, reduction="none")).backward()
                if batches.step_ends:
                    optimizer.step(), optimizer.zero_grad(), state.commit()
"""
LOUDER = """
    def decode(self, packets, original=Int8.decode):
        return original(self, packets) * 1.01
    Int8.decode = decode
"""
ON_ONE_RANK = """
    import os
    if os.environ["RANK"] == "1":
"""
USUAL = {"codec": "'int8'", "scaled": "False", "loss": "loss", "between": "", "behind": ""}
FORGETTING = "world.rank == 1 and model.compression.memory.load({})"
CLIPPING = "nn.utils.clip_grad_norm_(model.parameters(), 0.05)"
EVALUATING = (
    "samestep.evaluate(lambda b: (model(b[0]), b[1]), data, world, batch_size=32, "
    "metrics={'loss': lambda o, y: nn.functional.cross_entropy(o, y)})"
)
PADDED = "DataLoader(TensorDataset(*data[:95]), 10, sampler=DistributedSampler(range(95), world.size, world.rank))"
PADDING = (
    f"with torch.no_grad(): torch.distributed.all_reduce(sum(model(x).isfinite()[:, 0].sum() for x, y in {PADDED}))"
)
DIVIDING = "[p.grad.div_(world.size) for p in model.parameters()]"

# name -> ranks, what is not as usual, what stands before the script
SCRIPTS: dict[str, tuple[int, dict[str, str], str]] = {
    "int8": (2, {}, ""),
    "powersgd": (3, {"codec": "'powersgd'"}, ""),
    "clipping": (2, {"codec": "TopK(fraction=0.05)", "scaled": "True", "between": CLIPPING}, ""),
    "doubled": (2, {"loss": "world.size * loss"}, ""),
    "louder": (2, {}, LOUDER),
    "forgetting": (2, {"behind": FORGETTING}, ""),
    "evaluating": (2, {"codec": "TopK(fraction=0.05)", "behind": EVALUATING}, ""),
    "padding": (2, {"behind": PADDING}, ""),
}
FURTHER: dict[str, tuple[int, dict[str, str], str]] = {
    "topk": (2, {"codec": "TopK(fraction=0.05, momentum=0.9)"}, ""),
    "divided again": (2, {"between": DIVIDING}, ""),
    "clamped": (2, {"between": "nn.utils.clip_grad_value_(model.parameters(), 0.01)"}, ""),
    "twice": (2, {"between": "nn.functional.cross_entropy(model(x), y).backward()"}, ""),
    "louder on one rank": (2, {}, ON_ONE_RANK + textwrap.indent(LOUDER, "    ")),
}


def written(text: str, folder: Path) -> Path:
    (folder / "train.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return folder / "train.py"


def train(changes: dict[str, str], before: str) -> str:
    return TRAIN.replace("    generator =", f"{before}    generator =", 1).format(**(USUAL | changes))


def verified(scripts: dict[str, tuple[int, str]], folders: pytest.TempPathFactory) -> Lazily[Report]:
    def verify(name: str) -> Report:
        ranks, text = scripts[name]
        return samestep.verify(written(text, folders.mktemp("script")), ranks=ranks)

    return Lazily(verify)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    scripts = {name: (ranks, train(changes, before)) for name, (ranks, changes, before) in SCRIPTS.items()}
    return verified({"accumulating": (3, ACCUMULATING)} | scripts, tmp_path_factory)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    scripts = {name: (ranks, train(changes, before)) for name, (ranks, changes, before) in FURTHER.items()}
    return verified(scripts, tmp_path_factory)


def check_agreement(report: Report, codec: str) -> None:
    report.require_same()
    assert report.findings == []
    assert report.coverage["gradients"] == "agrees as declared"
    before, after = r"worst error \d\.\de-0[78] of a tensor's norm, 4 steps", "the declared codec's bits, 4 steps"
    assert re.fullmatch(rf"before {codec}: {before}; after it: {after}", report.margins["gradients"])


@pytest.mark.parametrize(("name", "codec"), [("int8", "Int8"), ("powersgd", "PowerSGD"), ("clipping", "TopK")])
def test_compressed_gradients_agree_as_declared(reports: Lazily[Report], name: str, codec: str) -> None:
    check_agreement(reports[name], codec)


@pytest.mark.prove
def test_momentum_under_top_k_agrees_as_declared(further: Lazily[Report]) -> None:
    check_agreement(further["topk"], "TopK")


@pytest.mark.prove
def test_micro_batches_agree_and_what_is_owed_outlives_a_kill(reports: Lazily[Report]) -> None:
    report = reports["accumulating"]
    report.require_same()
    assert report.coverage["gradients"] == "agrees as declared"
    assert report.coverage["checkpoint"] == "identical"
    assert any(remark.startswith("in float64 ranks and one process agree") for remark in report.remarks), report
    assert "in float64, and as virtual ranks, gradients are not compressed" in report.remarks


def test_a_wrong_loss_is_found_as_without_compression(reports: Lazily[Report]) -> None:
    (found,) = reports["doubled"].errors
    assert (found.code, found.factor) == ("gradient-scale", pytest.approx(2.0, rel=1e-3))


def test_evaluations_are_compared_where_the_ranks_weights_are_known(reports: Lazily[Report]) -> None:
    """The script alone steps with gradients that are not compressed, so weights of its own would prove nothing."""
    report = reports["evaluating"]
    report.require_same()
    assert report.findings == []
    assert report.coverage["evaluation"] == "agrees"


def test_a_wrong_evaluation_is_found_as_without_compression(reports: Lazily[Report]) -> None:
    (found,) = reports["padding"].errors
    assert found.code == "evaluation-inexact"
    assert "all_reduce" in (found.where and Path(found.where.rpartition(":")[0]).read_text(encoding="utf-8"))


@pytest.mark.prove
def test_what_is_done_to_averaged_gradients_is_compared_too(further: Lazily[Report]) -> None:
    (found,) = further["divided again"].errors
    assert (found.code, found.factor) == ("gradient-scale", pytest.approx(0.5, rel=1e-3))
    assert "between backward and step" in found.cause


def test_a_codec_that_does_something_else_is_found(reports: Lazily[Report]) -> None:
    (found,) = reports["louder"].errors
    assert (found.code, found.step, found.tensor) == ("gradient-differs", 0, "0.weight")
    assert "is not what the declared codec, Int8, gives" in found.cause
    path, _, line = (found.where or ":0").rpartition(":")
    assert "samestep.replicate(" in Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1]


@pytest.mark.prove
def test_a_codec_that_does_something_else_on_one_rank_is_found_there(further: Lazily[Report]) -> None:
    codes = {finding.code: finding for finding in further["louder on one rank"].errors}
    assert codes.keys() == {"gradients-not-synchronised", "gradient-differs"}
    assert "is not what the declared codec, Int8, gives" in codes["gradient-differs"].cause


def test_a_rank_that_forgets_what_it_owes_is_named(reports: Lazily[Report]) -> None:
    (found,) = reports["forgetting"].errors
    assert (found.code, found.rank, found.step) == ("gradient-differs", 1, 1)
    assert "what rank 1 remembers" in found.cause
    assert "not what Int8 left" in found.cause


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "why"),
    [("twice", "averaged 2 times in a step"), ("clamped", "changes compressed gradients, and not by a")],
)
def test_what_cannot_be_judged_is_said(further: Lazily[Report], name: str, why: str) -> None:
    report = further[name]
    assert (report.verdict, report.findings) == ("inconclusive", [])
    assert why in report.coverage["gradients"]
