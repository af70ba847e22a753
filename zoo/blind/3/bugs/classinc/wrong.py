"""Class-incremental learning on digits: first 0-4, then the head grows for 5-9."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


class GrowingNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.head = nn.Linear(48, n_classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def grow(self, n_new):
        """Add output units, keeping what the old ones have learned."""
        old = self.head
        new = nn.Linear(old.in_features, old.out_features + n_new)
        with torch.no_grad():
            new.weight[: old.out_features] = old.weight
            new.bias[: old.out_features] = old.bias
        self.head = new


class Learner:
    def __init__(self, x, y, batch):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.x, self.y, self.batch = x, y, batch
        torch.manual_seed(31)
        self.net = DDP(GrowingNet(5), find_unused_parameters=True)
        self.history = []

    def loader(self, classes, size):
        pick = torch.isin(self.y, torch.tensor(classes)).nonzero().squeeze(1)[:size]
        data = TensorDataset(self.x[pick], self.y[pick])
        sampler = DistributedSampler(data, shuffle=True, seed=6)
        return DataLoader(data, batch_size=self.batch // self.world, sampler=sampler), sampler

    def learn(self, classes, size, epochs, lr):
        loader, sampler = self.loader(classes, size)
        opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(1)
            for x, y in loader:
                loss = F.cross_entropy(self.net(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.detach()
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"classes {classes[0]}-{classes[-1]} epoch {epoch} loss {total.item() / self.world / len(loader):.4f}", flush=True)

    @torch.no_grad()
    def test(self, x, y, classes):
        keep = torch.isin(y, torch.tensor(classes))
        return (self.net.module(x[keep]).argmax(1) == y[keep]).float().mean().item()


def main():
    dist.init_process_group("gloo")
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    learner = Learner(x[:1500], y[:1500], batch=72)

    first, everything = list(range(5)), list(range(10))
    learner.learn(first, 720, epochs=2, lr=0.1)
    a = learner.test(x[1500:], y[1500:], first)

    learner.net.module.grow(5)
    learner.learn(everything, 1440, epochs=1, lr=0.1)
    b = learner.test(x[1500:], y[1500:], everything)
    if learner.rank == 0:
        print(f"accuracy: first task {a:.4f}, all classes {b:.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
