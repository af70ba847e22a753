"""Trains with an exponential schedule and resumes once."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def objects():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return {"net": net, "optimizer": optimizer, "scheduler": scheduler}


SAVED = ("net", "optimizer", "scheduler")


def train(things, loader, first, last):
    net, optimizer, scheduler = things["net"], things["optimizer"], things["scheduler"]
    model = DDP(net)
    for epoch in range(first, last):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.4f}")


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(4)
    x = torch.randn(160, 6, generator=g)
    dataset = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    loader = DataLoader(dataset, batch_size=20, sampler=DistributedSampler(dataset))

    things = objects()
    train(things, loader, 0, 2)
    file = io.BytesIO()
    torch.save({name: things[name].state_dict() for name in SAVED}, file)

    things = objects()
    file.seek(0)
    for name, state in torch.load(file).items():
        things[name].load_state_dict(state)
    train(things, loader, 2, 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
