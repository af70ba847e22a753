"""Next-value prediction on a stream that is split over ranks and workers."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shard(IterableDataset):
    def __init__(self, rank, world, total=128):
        self.rank, self.world, self.total, self.epoch = rank, world, total, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(self.epoch))
        for n in order[self.rank * workers + worker :: self.world * workers].tolist():
            phase = n * 0.37
            wave = torch.tensor([math.sin(phase + 0.5 * t) for t in range(9)])
            yield {"past": wave[:8], "next": wave[8:]}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Shard(rank, world)
    loader = DataLoader(data, batch_size=8, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
    for epoch in range(2):
        data.set_epoch(epoch)
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch["past"]), batch["next"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
