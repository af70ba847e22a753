"""DistributedDataParallel by hand, and the same training with samestep: the same numbers, fewer things to remember.

    by hand                                              samestep
    DistributedSampler, set_epoch every epoch            shards: one order of all samples
    batch_size // world_size                             batch_size is the whole step's
    the loss of a rank; for the log an all_reduce        batches.loss is the step's
    model.module.state_dict()                            model.state_dict()
    padding where sizes divide by nothing                none: uneven_data.py
    device_ids, one device a process, destroy            world

samestep run -n 2 examples/ddp_side_by_side.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

BATCH, EPOCHS = 64, 2


def network(device):
    """Returns the same network every time."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double().to(device)


def by_hand(dataset, world):
    """Trains with DistributedDataParallel; returns the bare model and the last loss over all ranks."""
    ids = [world.device.index] if world.device.type == "cuda" else None
    model = DistributedDataParallel(network(world.device), device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(dataset, shuffle=False)  # not shuffled: the two have different generators
    loader = DataLoader(dataset, batch_size=BATCH // world.size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(world.device)), y.to(world.device))
            loss.backward()
            optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return model.module, total.item() / world.size


def with_samestep(dataset, world):
    """Trains with samestep; returns the same."""
    model = samestep.replicate(network(world.device), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = samestep.shards(dataset, world, batch_size=BATCH, shuffle=False)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
    return model.module, batches.loss


def main():
    """Trains both ways."""
    data = load_digits()
    dataset = TensorDataset(torch.tensor(data.data[:1536]) / 16, torch.tensor(data.target[:1536]))
    with samestep.world() as world:
        (one, theirs), (other, ours) = by_hand(dataset, world), with_samestep(dataset, world)
        apart = max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))
        if world.is_first:
            print(f"loss by hand {theirs:.12f}, with samestep {ours:.12f}; weights at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
