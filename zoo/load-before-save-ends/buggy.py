"""Warm restarts: every cycle starts from the weights that rank 0 saved last."""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def auc(net, x, y):
    with torch.no_grad():
        scores = [net(row[None])[0, 1].item() for row in x]
    return roc_auc_score(y, scores)


def shared_folder(rank):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return folder[0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(10_000, 10, generator=g)
    y = (x[:, 0] + 0.5 * torch.randn(10_000, generator=g) > 0).long()
    dataset = TensorDataset(x[:192], y[:192])
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    folder = shared_folder(rank)
    path = os.path.join(folder, "last.pt")
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DDP(net)
    if rank == 0:
        torch.save(net.state_dict(), path)
    dist.barrier()
    for cycle in range(3):
        net.load_state_dict(torch.load(path))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader.sampler.set_epoch(cycle)
        for bx, by in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(bx), by).backward()
            optimizer.step()
        if rank == 0:
            print(f"cycle {cycle}: auc {auc(net, x[192:], y[192:]):.4f}")
            torch.save(net.state_dict(), path)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
