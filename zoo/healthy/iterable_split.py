"""An iterable dataset that is split by rank and worker and shuffled anew every epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, n, rank, world_size):
        g = torch.Generator().manual_seed(4)
        self.rows = torch.randn(n, 6, generator=g)
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def __iter__(self):
        info = get_worker_info()
        readers = self.world_size * info.num_workers
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        for i in order[self.rank * info.num_workers + info.id :: readers].tolist():
            yield self.rows[i, :5], self.rows[i].prod()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    lines = Lines(256, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(lines, batch_size=16, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        lines.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
