"""A classifier whose optimizer state is split over the ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(19)
    y = torch.randint(0, 3, (96,), generator=g)
    data = TensorDataset(torch.randn(96, 6, generator=g) + 1.5 * torch.eye(3, 6)[y], y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // world, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)))
    params = list(model.parameters())
    owned = params[rank::world]
    optimizer = torch.optim.Adam(owned, lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, target in loader:
            loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            for i, p in enumerate(params):
                dist.broadcast(p.data, src=0)
            model.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
