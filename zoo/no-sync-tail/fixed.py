"""A convolutional classifier with gradient accumulation and a shorter last window."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Accumulator:
    def __init__(self, model, optimizer, every):
        self.model, self.optimizer, self.every = model, optimizer, every

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self, loader):
        count = len(loader)
        for i, (x, y) in enumerate(loader):
            window = min(self.every, count - i // self.every * self.every)
            sync = (i + 1) % self.every == 0 or i + 1 == count
            with nullcontext() if sync else self.model.no_sync():
                loss = nn.functional.cross_entropy(self.model(x), y)
                (loss / window).backward()
            if sync:
                self.update()
        if not sync:
            self.update()
        return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (112,), generator=g)
    data = TensorDataset(torch.randn(112, 1, 6, 6, generator=g) + 0.5 * y.view(-1, 1, 1, 1), y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)))
    trainer = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), every=3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        loss = trainer.epoch(loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
