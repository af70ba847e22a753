"""Data and model parallelism at once: several replicas, each cut into two halves. Three ways, one training.

                     replica 0            replica 1
    first half       device 0 ──┐         device 2 ──┐          the same halves average their gradients:
    second half      device 1 ◀─┘         device 3 ◀─┘          0 with 2, 1 with 3

samestep run -n 2 examples/data_and_model_parallel.py --way ddp         # 2 processes of 2 devices, by hand
samestep run -n 2 examples/data_and_model_parallel.py --way devices     # the same, cut by samestep
samestep run -n 4 examples/data_and_model_parallel.py --way pipeline    # 4 processes of 1 device

By hand: DistributedDataParallel around layers on several devices, without `device_ids`. Without GPUs all are the CPU.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep


def network():
    """Returns the same network every time, of two halves."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()


class Halves(nn.Module):  # noqa: D101  (the first layer on one device, the rest on another)
    def __init__(self, whole, devices):
        super().__init__()
        self.devices, self.first, self.second = devices, whole[:2].to(devices[0]), whole[2:].to(devices[1])

    def forward(self, x):  # noqa: D102  (as ever)
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


def prepared(way, world, sample):
    """Returns a model and what takes forward and backward of a batch."""
    if way == "ddp":
        own = [f"cuda:{2 * world.local_rank + half}" if torch.cuda.is_available() else "cpu" for half in range(2)]
        model = DistributedDataParallel(Halves(network(), own))
        return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1].to(model.module.devices[1])).backward()
    plan = samestep.plan_pipeline(network(), sample, F.cross_entropy, stages=2, repeats=1)
    model = samestep.pipeline(network(), world, plan, devices=2 if way == "devices" else None)
    return model, model.step


def train(model, step, batches):
    """Trains one epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        step(batch)
        optimizer.step()


def main():
    """Trains the way that is asked for, then in one process on whole batches, and compares the outputs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", default="ddp", choices=("ddp", "devices", "pipeline"))
    way, data = parser.parse_args().way, load_digits()
    x, y = torch.tensor(data.data[:1536]) / 16, torch.tensor(data.target[:1536])
    with samestep.world(pipeline=2 if way == "pipeline" else 1) as world:
        model, step = prepared(way, world, (x[:64], y[:64]))
        train(model, step, samestep.shards(TensorDataset(x, y), world, batch_size=64, shuffle=False))
        alone, whole = network(), zip(x.split(64), y.split(64), strict=True)
        train(alone, lambda batch: F.cross_entropy(alone(batch[0]), batch[1]).backward(), whole)
        with torch.no_grad():
            apart = (model(x).cpu() - alone(x)).abs().max().item()
        if world.is_first:
            print(f"{way}, {world.size} processes: outputs at most {apart:.1e} from those of one process")


if __name__ == "__main__":
    main()
