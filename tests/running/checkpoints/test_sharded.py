"""Tensors that are cut among the ranks: whole in the checkpoint, and cut as the next model wants them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import assert_same_bits

STEPS = 3


def make(kind, world):
    """5 and 7 rows divide by no number of ranks here; a buffer and a scalar are on every rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    net.register_buffer("seen", torch.arange(3.0))
    if kind == "FSDP":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (world.size,)))
    elif kind != "plain":
        cut_by_hand(net, kind, world)
    return net


def cut_by_hand(net, kind, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    place = {"rows": Shard(0), "columns": Shard(1), "everywhere": Replicate()}[kind]
    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [place]))


def whole(tensor):
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def held(net, optimizer):
    moments = [entry for state in optimizer.state_dict()["state"].values() for entry in state.values()]
    return [whole(tensor) for tensor in [*net.parameters(), *net.buffers(), *moments]]


def save(kind, path):
    """Steps with made-up gradients, alike however the model is cut: what is computed is not the question here."""
    with samestep.world() as world:
        net = make(kind, world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        state = samestep.checkpoint(path, world, model=net, optimizer=optimizer)
        for step in range(STEPS):
            for number, parameter in enumerate(net.parameters()):
                parameter.grad = torch.ones_like(parameter) * (1 + number + step)
            optimizer.step()
            state.commit()
        net.seen += 1
        state.save()
        return held(net, optimizer)


def load(kind, path):
    with samestep.world() as world:
        net = make(kind, world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        state = samestep.checkpoint(path, world, model=net, optimizer=optimizer)
        cut = [hasattr(parameter, "full_tensor") for parameter in net.parameters()]
        moments = [hasattr(entry["exp_avg"], "full_tensor") for entry in optimizer.state.values()]
        return held(net, optimizer), state.step, cut == moments


@pytest.mark.parametrize("kind", ["FSDP", "rows", "columns", "everywhere"])
def test_what_was_cut_in_one_way_loads_in_any_other(two_ranks, three_ranks, tmp_path, kind):
    saved = two_ranks(save, kind, tmp_path / "run")
    assert_same_bits(saved[0], saved[1])
    others = [("FSDP", three_ranks), ("columns", three_ranks), ("plain", two_ranks), (kind, two_ranks)]
    for other, ranks in others:
        for tensors, step, is_cut_alike in ranks(load, other, tmp_path / "run"):
            assert_same_bits(tensors, saved[0])
            assert (step, is_cut_alike) == (STEPS, True), other


def test_a_plain_checkpoint_loads_into_a_model_that_is_cut(two_ranks, tmp_path):
    saved = save("plain", tmp_path / "run")
    for tensors, step, is_cut_alike in two_ranks(load, "FSDP", tmp_path / "run"):
        assert_same_bits(tensors, saved)
        assert (step, is_cut_alike) == (STEPS, True)


def sizes(kind, path):
    from safetensors import safe_open

    save(kind, path)
    (file,) = path.glob("step-*/tensors.safetensors")
    with safe_open(file, "pt") as tensors:
        return {name: list(tensors.get_tensor(name).shape) for name in tensors.keys()}  # noqa: SIM118


def test_the_file_holds_whole_tensors(two_ranks, tmp_path):
    found = two_ranks(sizes, "rows", tmp_path / "run")[0]
    assert found["model/0.weight"] == [7, 5]
    assert found["optimizer/state/0/exp_avg"] == [7, 5]
    assert found["model/seen"] == [3]
