"""FullyShardedDataParallel (FSDP1): flat parameters are told by the names and shapes that they have without it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from journals import Event, record, step, stepped
from lazily import Lazily
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

import samestep
from samestep import Report
from samestep.instrument.randomness import in_full_precision
from samestep.runtime.digest import digest
from samestep.verification.journal import TraceWriter, place_of, value_path
from samestep.verification.judging import control, shards, storage
from samestep.verification.judging.record import Rank, Record, Run, part_at
from samestep.verification.recording import parts
from samestep.verification.recording.flat import slices
from samestep.verification.recording.optimizers import Optimizers, digests, held, own_states, state_of
from samestep.verification.reference.updates import UpdateReplay
from samestep.verification.runs import Ended

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD")
CPU = torch.device("cpu")
TRAIN = """
    import contextlib, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp import StateDictType
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))
    how = dict(device_id=torch.device("cpu"), {how})
    model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), FSDP(nn.Linear(17, 5), **how), nn.Linear(5, 3))
    model = FSDP(model, **how)
    {made}
    optimizer = {optimizer}
    for step, (x, y) in enumerate(loader):
        with model.no_sync() if {no_sync} else contextlib.nullcontext():
            loss = (model(x) - y).square().mean()
            {backward}
        if {steps}:
            {clip}
            optimizer.step()
            optimizer.zero_grad()
        {behind}
    dist.destroy_process_group()
"""
RIGHT = {
    "how": "use_orig_params=False",
    "made": "",
    "optimizer": "torch.optim.AdamW(model.parameters(), lr=1e-2)",
    "no_sync": "False",
    "backward": "loss.backward()",
    "steps": "True",
    "clip": "model.clip_grad_norm_(0.1)",
    "behind": "",
}
ORIGINAL = RIGHT | {"how": "use_orig_params=True"}
REPLICAS = ORIGINAL | {"how": "use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD"}
RESUME = """if step == 3:
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                state = {{"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}}
                if rank == 0:
                    torch.save(state, "state.pt")
                dist.barrier()
                state = torch.load("state.pt")
                {loaded}
                optimizer = {optimizer}
                {restored}
"""
RESUMED = {
    "optimizer": RIGHT["optimizer"],
    "loaded": 'model.load_state_dict(state["model"])',
    "restored": 'optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))',
}
SCALING = """class Scaling(torch.optim.SGD):
        def step(self):
            for one in self.param_groups[0]["params"]:
                if one.grad is not None:
                    one.grad = one.grad * one.norm() / (one.grad.norm() + 1e-6)
            super().step()
"""
MOMENTUM = {"optimizer": "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)"}
SCRIPTS = {
    "flat": RIGHT,
    "original, accumulated": ORIGINAL
    | {
        "how": "use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, "
        "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)",
        "no_sync": "step % 2 == 0",
        "steps": "step % 2",
        "backward": "(loss / 2).backward()",
    },
    "replicas": REPLICAS,
    "replicas, flat": REPLICAS | {"how": "sharding_strategy=ShardingStrategy.NO_SHARD"},
    "hybrid": RIGHT
    | {
        "how": "use_orig_params=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD, "
        "device_mesh=dist.init_device_mesh('cpu', (2, 2) if world == 4 else (1, 1))"
    },
    # one state each: torch 2.13 on CPUs saves the last of several in place of all (optim_state_dict, use_orig_params)
    "resumed": ORIGINAL | MOMENTUM | {"behind": RESUME.format(**RESUMED | MOMENTUM)},
    "resumed, flat": RIGHT | {"behind": RESUME.format(**RESUMED)},
    "divided twice": RIGHT | {"clip": "[one.grad.div_(world) for one in model.parameters()]"},
    "clipped in shards": ORIGINAL | {"clip": "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"},
    "changed on one rank": RIGHT | {"made": "rank and [*model.parameters()][0].data[-3:].add_(1)"},
    "changed on one rank, original": ORIGINAL | {"made": "rank and model.module[3].bias.data.add_(1)"},
    "replica changed on one rank": REPLICAS | {"made": "rank and model.module[3].bias.data.add_(1)"},
    "second model not wrapped": RIGHT
    | {
        "made": "head = nn.Linear(3, 3)",
        "backward": "(loss + (head(model(x)) - y).square().mean()).backward()",
        "optimizer": "torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-2)",
    },
    "normalised in shards": ORIGINAL
    | {"clip": "[one.grad.div_(one.grad.norm() + 1e-6) for one in model.parameters() if one.grad is not None]"},
    "steps scaled in shards": ORIGINAL | {"made": SCALING, "optimizer": "Scaling(model.parameters(), lr=1e-2)"},
    "never synchronised": REPLICAS | {"no_sync": "True"},
    "resumed without state": RIGHT | {"behind": RESUME.format(**RESUMED | {"restored": ""})},
    "resumed without weights": RIGHT
    | {"behind": RESUME.format(**RESUMED | {"loaded": "[one.data.mul_(0.5) for one in model.parameters()]"})},
}


# --- what a rank holds ----------------------------------------------------------------------


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """A process group that sends nothing: FSDP cuts its parameters at once, and fetches none."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(5, 7), nn.Linear(7, 3))


def wrapped(**how: Any) -> FullyShardedDataParallel:
    model = plain()
    model[2] = FullyShardedDataParallel(model[2], device_id=CPU, **how)
    return FullyShardedDataParallel(model, device_id=CPU, **how)


def watched(folder: Path, model: nn.Module) -> tuple[Optimizers, torch.optim.Optimizer]:
    optimizers, optimizer = Optimizers(TraceWriter(folder, 0)), torch.optim.AdamW(model.parameters())
    optimizers.add(optimizer, "train.py:1")
    return optimizers, optimizer


def numbered(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter of an optimizer gradients and momenta that are multiples of what it holds."""
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.numel():
            parameter.grad = 2 * parameter.data
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": 3 * parameter.data, "turns": 4}


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_ranks_hold_is_together_what_one_process_has(tmp_path: Path, size: int, *, original: bool) -> None:
    told = []
    for rank in range(size):
        with as_rank(rank, size):
            optimizers, optimizer = watched(tmp_path / str(rank), model := wrapped(use_orig_params=original))
            numbered(optimizer)
            parameters = optimizers.parameters(optimizer)
            assert not optimizers.are_replicas
            assert not any(is_trained for _, is_trained in optimizers.unheld())
            assert optimizers.probe() is None
            gradients = {name: one.grad for name, one in parameters.items()}
            told.append([optimizers.values(), held(gradients), optimizers.updated(optimizer)["states"]])
            assert all(map(place_of, digests(parameters).values()))
            del optimizers, optimizer, parameters, model
    values, gradients, states = (parts.joined([one[kind] for one in told]) for kind in range(3))
    right = dict(plain().named_parameters())
    assert values["parameters"][0].keys() == right.keys()
    for name, one in right.items():
        assert values["parameters"][0][name].equal(one)
        assert values["parameters"][0][name].stride() == one.stride()
        assert gradients[name].equal(2 * one)
        assert states[name]["exp_avg"].equal(3 * one)
        assert (states[name]["step"], states[name]["turns"]) == (3, 4)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("size", [1, 2])
def test_where_nothing_is_cut_parameters_are_whole_and_can_be_written(
    tmp_path: Path, size: int, *, original: bool
) -> None:
    with as_rank(0, size):
        how = {"use_orig_params": original, "sharding_strategy": ShardingStrategy.NO_SHARD}
        model = wrapped(**how)
        optimizers, optimizer = watched(tmp_path, model)
        numbered(optimizer)
        right = {name: one.detach().clone() for name, one in plain().named_parameters()}
        kept = optimizers.values()
        assert optimizers.are_replicas
        assert all(kept["parameters"][0][name].equal(one) for name, one in right.items())
        UpdateReplay(record([]), optimizers).put_back(
            {name: {"turns": 5, "exp_avg": one} for name, one in right.items()}
        )
        assert all(state["turns"] == 5 for _, _, state in own_states(optimizers))
        assert all(state["exp_avg"].equal(right[name]) for name, state in state_of(optimizers).items())


def test_a_script_that_does_not_wrap_alone_has_the_names_of_its_model_in_its_order(tmp_path: Path) -> None:
    model = plain()
    optimizers, optimizer = watched(tmp_path, model)
    names = [name for name, _ in model.named_parameters()]
    optimizers.known = {(0, len(names)): names[::-1]}
    assert list(optimizers.parameters(optimizer)) == names
    other, of_other = watched(tmp_path / "other", plain())
    other.known = {(0, len(names)): [f"model 1: {name}" for name in names]}
    assert list(other.parameters(of_other)) == other.known[0, len(names)]


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_a_rank_holds_the_same_while_the_model_runs(*, original: bool) -> None:
    seen: list[dict[str, Any]] = []
    with as_rank(0, 2):
        model = wrapped(use_orig_params=original)
        before = digests({one.name: one for one in slices(model)})
        model.module[3].register_forward_pre_hook(
            lambda *_: seen.append(digests({one.name: one for one in slices(model)}))
        )
        model(torch.ones(2, 3, 2, 2)).sum().backward()
    assert seen == [before]


def test_what_no_rank_knows_is_nothing_and_a_part_lies_in_memory_as_it_is_kept() -> None:
    nothing, part = parts.Part((2, 2), None, torch.zeros(0)), parts.Part((2, 2), (1,), torch.ones(2), (1, 2))
    assert parts.joined([nothing, None]) is None
    assert parts.joined([nothing, part]).tolist() == [[0, 1], [1, 0]]
    assert part_at(parts.joined([nothing, part]), part.place).tolist() == [1, 1]


def test_its_mixed_precision_is_off_and_inputs_are_cast_all_the_same() -> None:
    policy = in_full_precision(MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True))
    assert (policy.param_dtype, policy.reduce_dtype, policy.keep_low_precision_grads) == (torch.float32, None, False)


# --- what is judged -------------------------------------------------------------------------


WHOLE = torch.tensor([1.0, 2.0, 3.0, 4.0])


def beginning(folder: Path, *ranks: torch.Tensor, also: float = 0.0) -> list[str]:
    """What is found of ranks that begin with these halves, where one process begins with `WHOLE`.

    `also` is added to what rank 1 has of another parameter.
    """
    places = ["[0]+[2]", "[2]+[2]"]
    told = []
    for rank, (place, half) in enumerate(zip(places, ranks, strict=True)):
        (folder / f"rank{rank}").mkdir(parents=True)
        of_rank = {
            name: parts.Part((4,), (2 * rank,), one)
            for name, one in (("v", WHOLE[2 * rank :][:2] + rank * also), ("w", half))
        }
        torch.save({"parameters": {0: of_rank}, "buffers": {}}, value_path(folder, rank, 1))
        start: Event = {
            "kind": "start",
            "parameters": {name: f"{place} {digest(one.values)}" for name, one in of_rank.items()},
        }
        told.append(Rank(rank, [start, {"kind": "window", "number": 0, "kept": 1}, step(0, "g"), stepped(0)]))
    (folder / "alone" / "rank0").mkdir(parents=True)
    torch.save({"v": WHOLE, "w": WHOLE}, value_path(folder / "alone", 0, 1))
    alone = Record(folder / "alone", [Rank(0, [{"kind": "own_start", "kept": 1}])])
    report = Report(ranks=2)
    shards.judge(Record(folder, told), Run(Ended(code=0, hung=False, failure=None, folder=folder), alone), report)
    return [f"{one.code} {one.rank} {one.tensor} {one.cause}" for one in report.findings]


def test_parts_that_one_rank_alone_has_changed_are_found(tmp_path: Path) -> None:
    assert beginning(tmp_path / "right", WHOLE[:2], WHOLE[2:]) == []
    assert beginning(tmp_path / "both draw others", WHOLE[:2] + 1, WHOLE[2:] + 1) == []
    (found,) = beginning(tmp_path / "changed", WHOLE[:2], WHOLE[2:] + 1)
    assert found.startswith(
        "initial-state-differs 1 w rank 1 begins with other numbers than one process in its part of w"
    )
    (found,) = beginning(tmp_path / "of another model", WHOLE[:2], WHOLE[2:] + 1, also=1.0)
    assert found.endswith("each has cut its parts out of a model of its own")
    (found,) = beginning(tmp_path / "drawn alike", WHOLE[2:], WHOLE[2:])
    assert "ranks 1 and 0 begin with the same numbers in their parts of w" in found


def resuming(after: str, saver_after: str = "[0]+[2] a") -> Report:
    """Rank 1 goes on with `after`, having held b behind step 0; rank 0 saves the whole, having held a."""
    state = {
        "parameters": {"w": "[0]+[2] a"},
        "buffers": {},
        "optimizers": [{"number": 0, "state": "m", "rates": [0.1]}],
    }
    content = {"path": "s.pt", "digests": {"w": "whole"}, "event": 1, "where": "train.py:40"}
    resumed = {"kind": "resumed", "path": "s.pt", "event": 1, "buffers": {}, "optimizers": []}
    about = [{"kind": "load", **content}, resumed | {"optimizers": [{"number": 1, "state": "n", "rates": [0.1]}]}]
    steps = [
        [step(0, "g"), {**stepped(0), "parameters": {"w": parts_of}}, *more, {**step(1, "g"), "parameters": {"w": now}}]
        for parts_of, now, more in (
            (saver_after, "[0]+[2] a", [{"kind": "save", **content, "state": state}, about[0], resumed]),
            ("[2]+[2] b", after, about),
        )
    ]
    report = Report(ranks=2)
    storage.judge(record(*steps), report)
    return report


def test_a_rank_whose_parts_another_has_saved_goes_on_with_its_own() -> None:
    assert (resuming("[2]+[2] b").findings, resuming("[2]+[2] b").coverage["checkpoint"]) == ([], "identical")
    (error,) = resuming("[2]+[2] c").errors
    assert (error.code, error.rank) == ("checkpoint-inexact", 1)
    assert "not known" in resuming("[2]+[2] c", saver_after="[0]+[2] before it was changed").coverage["checkpoint"]


def test_parts_that_are_clipped_by_their_own_norms_are_told_as_such() -> None:
    clips = [{"kind": "clip", "window": 0, "norm": norm, "most": 1.0, "where": "train.py:28"} for norm in (2.0, 3.0)]
    starts: list[Event] = [{"kind": "start", "parameters": {"w": f"[{rank}]+[1] x"}} for rank in (0, 1)]
    ranks = [[start, clip, step(0, "g"), stepped(0)] for start, clip in zip(starts, clips, strict=True)]
    report = Report(ranks=2)
    control.judge(record(*ranks), report)
    (found,) = report.evidence
    assert (found.code, found.where) == ("gradient-differs", "train.py:28")
    assert "its own parts of the gradients" in found.cause


# --- whole scripts --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")

    def verified(name: str) -> Report:
        path = folder / f"{name.replace(' ', '_').replace(',', '')}.py"
        path.write_text(textwrap.dedent(TRAIN.format(**SCRIPTS[name])), encoding="utf-8")
        return samestep.verify(path, ranks=4 if name == "hybrid" else 2)

    return Lazily(verified)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["flat", "original, accumulated", "replicas", "replicas, flat", "hybrid"])
def test_a_right_script_is_the_same_training(reports: Lazily[Report], name: str) -> None:
    reports[name].require_same()


@pytest.mark.parametrize("name", [pytest.param("resumed", marks=pytest.mark.prove), "resumed, flat"])
def test_what_is_saved_whole_and_loaded_goes_on(reports: Lazily[Report], name: str) -> None:
    reports[name].require_same()
    assert reports[name].coverage["checkpoint"] == "identical"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("divided twice", "gradient-scale"),
        pytest.param("clipped in shards", "gradient-differs", marks=pytest.mark.prove),
        pytest.param("changed on one rank", "initial-state-differs", marks=pytest.mark.prove),
        pytest.param("changed on one rank, original", "initial-state-differs", marks=pytest.mark.prove),
        pytest.param("replica changed on one rank", "initial-state-differs", marks=pytest.mark.prove),
        pytest.param("second model not wrapped", "gradients-not-synchronised", marks=pytest.mark.prove),
        pytest.param("normalised in shards", "gradient-differs", marks=pytest.mark.prove),
        pytest.param("steps scaled in shards", "update-differs", marks=pytest.mark.prove),
        pytest.param("never synchronised", "gradients-not-synchronised", marks=pytest.mark.prove),
        pytest.param("resumed without state", "checkpoint-inexact", marks=pytest.mark.prove),
        pytest.param("resumed without weights", "checkpoint-inexact", marks=pytest.mark.prove),
    ],
)
def test_a_wrong_script_is_found(reports: Lazily[Report], name: str, code: str) -> None:
    assert reports[name].verdict == "different"
    assert reports[name].errors[0].code == code
