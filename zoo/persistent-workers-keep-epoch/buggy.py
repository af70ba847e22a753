"""Streams shuffled samples through persistent loader workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ShuffledStream(IterableDataset):
    def __init__(self, n, rank, world_size, seed=0):
        g = torch.Generator().manual_seed(55)
        self.x = torch.randn(n, 8, generator=g)
        self.y = self.x.abs().sum(1, keepdim=True)
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        reader = self.rank * info.num_workers + info.id
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.x), generator=g)
        for index in order[reader :: self.world_size * info.num_workers]:
            yield self.x[index], self.y[index]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = ShuffledStream(256, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=16, num_workers=2, persistent_workers=True)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        stream.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
