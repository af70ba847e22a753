"""Two-task regression with dynamic weight averaging of the losses."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Depth(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(21)
        self.x = torch.randn(64, 8, generator=g)
        self.depth = self.x[:, :1] * 2 + 0.3 * torch.randn(64, 1, generator=g)
        self.normal = torch.tanh(self.x[:, 1:4]) * 5 + torch.randn(64, 3, generator=g)

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": self.x[i], "depth": self.depth[i], "normal": self.normal[i]}


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.depth, self.normal = nn.Linear(24, 1), nn.Linear(24, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.depth(h), self.normal(h)


def train_one_epoch(model, loader, optimizer, history, temperature=2.0):
    for batch in loader:
        depth, normal = model(batch["x"])
        losses = torch.stack(
            [nn.functional.l1_loss(depth, batch["depth"]), nn.functional.mse_loss(normal, batch["normal"])]
        )
        if len(history) >= 2:
            weights = 2 * torch.softmax(history[-1] / history[-2] / temperature, 0)
        else:
            weights = torch.ones(2)
        loss = (weights * losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen = losses.detach() / dist.get_world_size()
        dist.all_reduce(seen)
        history.append(seen)
    return history[-1]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(MultiTask())
    data = Depth()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16 // world, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    history = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        last = train_one_epoch(model, loader, optimizer, history)
        if rank == 0:
            print(f"epoch {epoch} depth {last[0]:.4f} normal {last[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
