"""Two machines: with one process for each device, or with one process that has several.

    one process per device                      one process, two devices
    node1   rank 0 cuda:0   rank 1 cuda:1       node1   rank 0 cuda:0 ─▶ cuda:1
    node2   rank 2 cuda:0   rank 3 cuda:1       node2   rank 1 cuda:0 ─▶ cuda:1

By hand, once on each machine (with a secret that both have in SAMESTEP_TOKEN: openssl rand -hex 16):

node1$ samestep run -n 2 --nnodes 2 --node-rank 0 --rendezvous node1:29500 examples/two_machines.py
node2$ samestep run -n 2 --nnodes 2 --node-rank 1 --rendezvous node1:29500 examples/two_machines.py
node1$ samestep run -n 1 --nnodes 2 --node-rank 0 --rendezvous node1:29500 examples/two_machines.py --devices 2
node2$ samestep run -n 1 --nnodes 2 --node-rank 1 --rendezvous node1:29500 examples/two_machines.py --devices 2

From one of them, over ssh or pdsh or clush, or through Slurm or mpiexec (-n counts processes on each host):

node1$ samestep run -n 2 --hosts node1,node2 examples/two_machines.py
node1$ samestep run -n 2 --hosts node1,node2 --via pdsh examples/two_machines.py
node1$ samestep run -n 2 --slurm --nnodes 2 examples/two_machines.py

On this machine, to try it out:

samestep run -n 2 examples/two_machines.py
samestep run -n 1 examples/two_machines.py --devices 2
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def main():
    """Trains one epoch; the loss is the same however many processes and devices there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    devices, data = parser.parse_args().devices, load_digits()
    dataset = TensorDataset(torch.tensor(data.data) / 16, torch.tensor(data.target))
    with samestep.world() as world:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
        if devices > 1:
            plan = samestep.plan_pipeline(model, dataset[:64], F.cross_entropy, stages=devices, repeats=1)
            model = samestep.pipeline(model, world, plan, devices=devices)
        else:
            model = samestep.replicate(model.to(world.device), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        batches = samestep.shards(dataset, world, batch_size=64)
        for x, y in batches:
            optimizer.zero_grad()
            if devices > 1:
                model.step((x, y))
            else:
                batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
        where = f"machine {os.environ.get('GROUP_RANK', '0')}, process {world.local_rank} there"
        print(f"rank {world.rank} of {world.size}, {where}: loss {batches.loss:.12f}")


if __name__ == "__main__":
    main()
