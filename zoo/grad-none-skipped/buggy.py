"""Two regression tasks with one head each; a rank's batch holds one task."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Tasks(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(41)
        self.x = torch.randn(n, 5, generator=g)
        self.task = torch.arange(n) % 2
        self.y = torch.where(self.task == 0, self.x[:, 0] * 2, self.x[:, 1:3].sum(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], self.task[i]


class ByTask(Sampler):
    def __init__(self, data, half, rank, world):
        self.data, self.half, self.rank, self.world, self.epoch = data, half, rank, world, 0

    def __len__(self):
        return len(self.data) // (2 * self.half)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.data) // 2, generator=g)
        for step in range(len(self)):
            chosen = 2 * order[step * self.half : (step + 1) * self.half]
            batch = torch.cat([chosen, chosen + 1] if step % 2 else [chosen + 1, chosen])
            yield batch.chunk(self.world)[self.rank].tolist()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.head_a = nn.Linear(16, 1)
        self.head_b = nn.Linear(16, 1)

    def forward(self, x, task):
        h = self.trunk(x)
        out = torch.zeros(len(x))
        for number, head in enumerate((self.head_a, self.head_b)):
            chosen = task == number
            if chosen.any():
                out[chosen] = head(h[chosen]).squeeze(-1)
        return out


def average_gradients(model):
    size = float(dist.get_world_size())
    for p in model.parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= size


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Tasks()
    batches = ByTask(data, 8, rank, world)
    loader = DataLoader(data, batch_sampler=batches)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        batches.epoch = epoch
        for x, y, task in loader:
            loss = nn.functional.mse_loss(model(x, task), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
