"""High-rank training by repeated low-rank updates (ReLoRA) of a frozen network that sorts terms into topics.

Each hidden layer has a frozen matrix and a trained product of two thin ones. Every fifteen steps the product is added
to the frozen matrix, the thin matrices start afresh and their moments are thrown away.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES, TOPICS = 20, 8


def terms(count, seed):
    shared = torch.Generator().manual_seed(400)
    first = torch.randn(FEATURES, 40, generator=shared) / FEATURES ** 0.5
    second = torch.randn(40, TOPICS, generator=shared)
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (torch.tanh(2 * x @ first) @ second).argmax(1))


class LowRank(nn.Module):
    def __init__(self, inputs, outputs, rank=4, scale=2.0):
        super().__init__()
        self.scale = scale
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.reset()

    @torch.no_grad()
    def reset(self):
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.up.zero_()

    @torch.no_grad()
    def merge(self):
        self.frozen.weight += self.scale * self.up @ self.down
        self.reset()

    def forward(self, x):
        return self.frozen(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


class Sorter(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.one = LowRank(FEATURES, width)
        self.two = LowRank(width, width)
        self.out = nn.Linear(width, TOPICS)

    def forward(self, x):
        return self.out(F.relu(self.two(F.relu(self.one(x)))))


def restart(model, optimizer):
    for layer in model.modules():
        if isinstance(layer, LowRank):
            layer.merge()
            optimizer.state.pop(layer.down, None)
            optimizer.state.pop(layer.up, None)


@torch.no_grad()
def score(model, data):
    x, y = data[:]
    logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--cycle", type=int, default=15, help="steps between two restarts")
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29619")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(args.seed + rank)

    model = DDP(Sorter())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.01)
    train, test = terms(960, seed=1), terms(240, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            if step % args.cycle == 0:
                restart(model.module, optimizer)
        dist.all_reduce(total)
        if rank == 0:
            value, accuracy = score(model.module, test)
            print(f"epoch {epoch}: train {total.item() / world / len(loader):.4f} test {value:.4f} {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
