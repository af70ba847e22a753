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
from lazily import Lazily
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

import samestep
from samestep import Report
from samestep.verification.journal import TraceWriter, place_of
from samestep.verification.judging.record import part_at
from samestep.verification.recording import parts
from samestep.verification.recording.flat import slices
from samestep.verification.recording.optimizers import Optimizers, digests, held, held_states, state_of, uncut
from samestep.verification.watching.plainly import _in_full

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
SCRIPTS = {
    "flat": RIGHT,
    "flat, stopped early": RIGHT,
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
        "device_mesh=None if world == 1 else dist.init_device_mesh('cpu', (2, world // 2))"
    },
    "resumed": ORIGINAL | {"behind": RESUME.format(**RESUMED)},
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
    "never synchronised": REPLICAS | {"no_sync": "True"},
    "resumed without state": RIGHT | {"behind": RESUME.format(**RESUMED | {"restored": ""})},
    "resumed without weights": RIGHT
    | {"behind": RESUME.format(**RESUMED | {"loaded": "[one.data.mul_(0.5) for one in model.parameters()]"})},
}
RANKS, STEPS = {"hybrid": 4}, {"flat, stopped early": 3}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")

    def verified(name: str) -> Report:
        path = folder / f"{name.replace(' ', '_').replace(',', '')}.py"
        path.write_text(textwrap.dedent(TRAIN.format(**SCRIPTS[name])), encoding="utf-8")
        return samestep.verify(path, ranks=RANKS.get(name, 2), steps=STEPS.get(name))

    return Lazily(verified)


@pytest.mark.parametrize("name", ["flat", "original, accumulated", "replicas", "replicas, flat", "hybrid"])
def test_a_right_script_is_the_same_training(reports: Lazily[Report], name: str) -> None:
    reports[name].require_same()
    print(reports[name])


@pytest.mark.parametrize("name", ["resumed", "resumed, flat"])
def test_what_is_saved_whole_and_loaded_goes_on(reports: Lazily[Report], name: str) -> None:
    reports[name].require_same()
    print(reports[name])
    assert reports[name].coverage["checkpoint"] == "identical"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("divided twice", "gradient-scale"),
        ("clipped in shards", "gradient-differs"),
        ("changed on one rank", "initial-state-differs"),
        ("changed on one rank, original", "initial-state-differs"),
        ("replica changed on one rank", "initial-state-differs"),
        ("second model not wrapped", "gradients-not-synchronised"),
        ("normalised in shards", "gradient-differs"),
        ("never synchronised", "gradients-not-synchronised"),
        ("resumed without state", "checkpoint-inexact"),
        ("resumed without weights", "checkpoint-inexact"),
    ],
)
def test_a_wrong_script_is_found(reports: Lazily[Report], name: str, code: str) -> None:
    print(reports[name])
    assert reports[name].verdict == "different"
    assert reports[name].errors[0].code == code
