"""Several GPUs in one process, by hand: a copy of the model on each, gradients added on the first, weights sent back.

samestep run -n 1 --fake-gpus 3 examples/gpu/several_gpus_one_process.py

It is what DataParallel does in threads. One process per GPU (launch_local_rank.py) is faster, and what samestep serves.
"""

import copy

import torch
from torch import nn

from data import digits


def main():
    """Takes eight steps on all GPUs, and the same on the first alone."""
    images, labels = digits().tensors
    ends = []
    for gpus in (torch.cuda.device_count(), 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double().to("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            batch = slice(96 * step, 96 * (step + 1))
            replicas = [model] + [copy.deepcopy(model).to(f"cuda:{gpu}") for gpu in range(1, gpus)]
            optimizer.zero_grad()
            parts = zip(replicas, images[batch].double().chunk(gpus), labels[batch].chunk(gpus), strict=True)
            for gpu, (replica, x, y) in enumerate(parts):
                replica.zero_grad()
                nn.functional.cross_entropy(replica(x.to(gpu)), y.to(gpu), reduction="sum").div(96).backward()
            for replica in replicas[1:]:
                for own, other in zip(model.parameters(), replica.parameters(), strict=True):
                    own.grad += other.grad.to(own.device)
            optimizer.step()
        ends.append([parameter.detach().cpu() for parameter in model.parameters()])
    apart = max((one - other).abs().max().item() for one, other in zip(*ends, strict=True))
    print(f"{torch.cuda.device_count()} GPUs in one process: the weights are at most {apart:.1e} from one GPU's")


if __name__ == "__main__":
    main()
