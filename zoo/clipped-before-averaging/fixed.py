"""A recurrent adder with hand-written averaging and clipping."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def adding_problem(n=256, length=12):
    g = torch.Generator().manual_seed(30)
    values = torch.rand(n, length, generator=g) * 4
    marks = torch.zeros(n, length)
    marks[torch.arange(n), torch.randint(0, length, (n,), generator=g)] = 1
    return TensorDataset(torch.stack([values, marks], 2), (values * marks).sum(1, keepdim=True))


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.gru(x)[0][:, -1])


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clip", type=float, default=0.3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = adding_problem()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = Adder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            average(model)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
