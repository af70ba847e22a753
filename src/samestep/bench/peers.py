"""The same loop as other libraries on DistributedDataParallel have it written: accelerate, Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F

from samestep.bench.workloads import Workload
from samestep.runtime.world import World

__all__: list[str] = []


def installed() -> list[str]:
    return [name for name, (module, _) in PEERS.items() if find_spec(module) is not None]


def steps_of_peer(name: str, task: Workload, world: World) -> Iterator[None]:
    """Trains on this rank's first batch as `bench.step.steps_of` does, one step for each item."""
    x, y = task.batch_of(world)
    network = task.network().to(world.device)
    prepare = PEERS[name][1]
    model, optimizer, backward = prepare(network, torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9), world)
    while True:
        backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        yield


def _accelerate(network: Any, optimizer: Any, world: World) -> tuple[Any, Any, Callable[[Any], Any]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=world.device.type == "cpu")
    model, optimizer = accelerator.prepare(network, optimizer)
    return model, optimizer, accelerator.backward


def _fabric(network: Any, optimizer: Any, world: World) -> tuple[Any, Any, Callable[[Any], Any]]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=world.device.type, devices=world.size, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(network, optimizer)
    return model, optimizer, fabric.backward


PEERS = {"accelerate": ("accelerate", _accelerate), "Lightning Fabric": ("lightning_fabric", _fabric)}
