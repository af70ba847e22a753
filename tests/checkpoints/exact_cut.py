"""The training of :mod:`exact_training` with weights that are cut among the ranks; whole ones on a rank alone."""

from __future__ import annotations

import contextlib
import os

import exact_training
import torch
import torch.distributed.checkpoint.default_planner  # once, before the ranks are forked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from samestep.checkpoints import sharded_save


def train(path, every, marks):
    """Trains until somebody kills it; every gradient is 1, as if a loss had said so."""
    sharded_save.HEARTBEAT_TIMEOUT_S = 2.0  # the other rank may be gone, and a test waits for this one to notice
    data = torch.utils.data.TensorDataset(torch.arange(float(exact_training.SAMPLES), dtype=torch.float64))
    mark = os.open(marks, os.O_WRONLY | os.O_NONBLOCK)
    with samestep.world(device="cpu") as world:
        model = exact_training.Counting()
        if world.size > 1:
            mesh = init_device_mesh("cpu", (world.size,))
            for number, weight in enumerate(model.weights):
                cut = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                model.weights[number] = nn.Parameter(cut)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
        batches = samestep.shards(data, world, batch_size=exact_training.BATCH, seed=5)
        state = samestep.checkpoint(path, world, every=every, model=model, optimizer=optimizer, data=batches)
        for _ in state.epochs(exact_training.EPOCHS):
            for (x,) in batches:
                batches.mean(x)
                for weight in model.parameters():
                    weight.grad = torch.ones_like(weight)
                optimizer.step()
                model.steps += 1
                state.commit()
                if world.is_first:
                    with contextlib.suppress(BlockingIOError):
                        os.write(mark, b".")
