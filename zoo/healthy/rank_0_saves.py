"""The first rank logs, saves and evaluates on the whole test set, the others wait at a barrier."""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g)
    return TensorDataset(x, (x.norm(dim=1) > 1.2).long())


@torch.no_grad()
def evaluate(net, dataset):
    net.eval()
    right = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(dataset, batch_size=30))
    net.train()
    return right / len(dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_set, test_set = rings(192, 1), rings(100, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    folder = tempfile.mkdtemp() if rank == 0 else None
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            accuracy = evaluate(model.module, test_set)
            torch.save(net.state_dict(), os.path.join(folder, f"epoch{epoch}.pt"))
            print(f"epoch {epoch}: {accuracy:.3f}")
        dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
