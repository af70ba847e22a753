"""Handwritten digits, row by row, through a mixture of experts that is balanced without an auxiliary loss.

The eight rows of a digit are eight tokens. Each token goes to two of eight experts; a bias on the router's choice is
raised for experts with too few tokens and lowered for those with too many, after each step.
"""
import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Experts(nn.Module):
    def __init__(self, width, hidden, count=8, top=2, rate=0.03):
        super().__init__()
        self.top, self.rate = top, rate
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, hidden) / width ** 0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) / hidden ** 0.5)
        self.register_buffer("bias", torch.zeros(count))
        self.load = torch.zeros(count)

    def forward(self, x):
        score = torch.sigmoid(self.router(x))
        chosen = (score + self.bias).topk(self.top, dim=-1).indices
        mask = torch.zeros_like(score).scatter(-1, chosen, 1.0)
        if self.training:
            self.load = mask.sum(dim=(0, 1)).detach()
        share = score * mask
        share = share / share.sum(-1, keepdim=True)
        hidden = torch.relu(torch.einsum("btw,ewh->bteh", x, self.up))
        return torch.einsum("bteh,ehw,bte->btw", hidden, self.down, share)

    @torch.no_grad()
    def rebalance(self):
        load = self.load.clone()
        dist.all_reduce(load)
        self.bias += self.rate * torch.sign(load.mean() - load)


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.place = nn.Parameter(0.3 * torch.randn(8, width))
        self.norm = nn.LayerNorm(width)
        self.experts = Experts(width, 16)
        self.leave = nn.Linear(8 * width, 10)

    def forward(self, rows):
        h = torch.tanh(self.enter(rows) + self.place)
        h = h + self.experts(self.norm(h))
        return self.leave(h.flatten(1))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=96, help="over all processes")
    p.add_argument("--lr", type=float, default=0.1)
    args = p.parse_args()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29616")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    train, x_test, y_test = TensorDataset(x[:1536], y[:1536]), x[1536:], y[1536:]
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=2)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler)

    torch.manual_seed(5)
    model = DDP(Net())
    experts = model.module.experts
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(())
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            experts.rebalance()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                logits = model.module(x_test)
                test = nn.functional.cross_entropy(logits, y_test).item()
            mean = total.item() / world / len(loader)
            print(f"epoch {epoch} train {mean:.4f} test {test:.4f} largest bias {experts.bias.abs().max():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
