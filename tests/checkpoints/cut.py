"""Models whose tensors are cut among the ranks in many ways, with optimizers, for tests that save and load them."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

import samestep

STEPS = 3
KINDS = ["FSDP", "rows", "columns", "everywhere", "HSDP", "FSDP and TP", "blocks"]
MESHES = {  # kind -> shape of the mesh for so many ranks, names
    "HSDP": (lambda size: (2, size // 2), ("copies", "parts")),
    "FSDP and TP": (lambda size: (2, size // 2), ("parts", "rows")),
    "blocks": (lambda size: (2, size // 2), ("down", "across")),
}


def mesh_of(kind, world):
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():  # a world of one has nobody to talk to, and a mesh wants a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape, names = MESHES.get(kind, (lambda size: (size,), ("all",)))
    return init_device_mesh("cpu", shape(world.size), mesh_dim_names=names)


def make(kind, world):
    """5, 7 and 1 rows divide by no number of ranks here; a buffer and a scalar are on every rank."""
    from torch.distributed.tensor import Replicate, Shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1))
    net.register_buffer("seen", torch.arange(3.0))
    if kind == "plain":
        return net
    mesh = mesh_of(kind, world)
    if kind in {"FSDP", "HSDP"}:
        fully_sharded(net, mesh)
    elif kind == "FSDP and TP":
        cut(net, mesh["rows"], [Shard(0)])
        fully_sharded(net, mesh["parts"])
    else:
        places = {"columns": [Shard(1)], "everywhere": [Replicate()], "blocks": [Shard(0), Shard(1)]}
        cut(net, mesh, places.get(kind, [Shard(0)]))
    return net


def fully_sharded(net, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=mesh)


def cut(net, mesh, placements):
    """The weights of all layers but the last; biases stay whole."""
    from torch.distributed.tensor import distribute_tensor

    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))


@contextlib.contextmanager
def nothing_gathered():
    """Within, whoever asks for a whole DTensor, or for another cut of one, fails."""
    from torch.distributed.tensor import DTensor

    def refuse(*_, **__):
        raise AssertionError("a tensor was gathered")

    kept = DTensor.full_tensor, DTensor.redistribute
    DTensor.full_tensor = DTensor.redistribute = refuse
    try:
        yield
    finally:
        DTensor.full_tensor, DTensor.redistribute = kept


def whole(tensor):
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def held(net, optimizer):
    moments = [entry for state in optimizer.state_dict()["state"].values() for entry in state.values()]
    return [whole(tensor) for tensor in [*net.parameters(), *net.buffers(), *moments]]


def trained(net, optimizer, steps=STEPS):
    """Steps with made-up gradients, alike however the model is cut: what is computed is not the question here."""
    for step in range(steps):
        for number, parameter in enumerate(net.parameters()):
            parameter.grad = torch.ones_like(parameter) * (1 + number + step)
        optimizer.step()


def save(kind, path):
    with samestep.world() as world:
        net = make(kind, world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        state = samestep.checkpoint(path, world, model=net, optimizer=optimizer)
        trained(net, optimizer)
        net.seen += 1
        state.step = STEPS
        with nothing_gathered():
            state.save()
        return held(net, optimizer)


def load(kind, path):
    with samestep.world() as world:
        net = make(kind, world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        with nothing_gathered():
            state = samestep.checkpoint(path, world, model=net, optimizer=optimizer)
        how = [getattr(parameter, "placements", None) for parameter in net.parameters()]
        moments = [getattr(entry["exp_avg"], "placements", None) for entry in optimizer.state.values()]
        return held(net, optimizer), state.step, how == moments
