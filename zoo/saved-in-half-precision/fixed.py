"""Trains with compact checkpoints and resumes from one."""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def checkpoint_state(net):
    return {name: value.to(torch.float32) for name, value in net.state_dict().items()}


def epoch_of(model, optimizer, loader, epoch):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item():.6f}")


def build():
    net = nn.Sequential(nn.Linear(3, 32), nn.GELU(), nn.Linear(32, 3))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "compact.pt")
    torch.manual_seed(0)
    x = torch.rand(192, 3)
    dataset = TensorDataset(x, torch.sin(3 * x))
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    net, optimizer = build()
    model = DDP(net)
    for epoch in range(2):
        epoch_of(model, optimizer, loader, epoch)
    if rank == 0:
        torch.save(checkpoint_state(net), path)
    dist.barrier()

    net, optimizer = build()
    net.load_state_dict(torch.load(path))
    model = DDP(net)
    for epoch in range(2, 4):
        epoch_of(model, optimizer, loader, epoch)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
