import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class PartitionedSGD:
    """Momentum SGD with the momentum buffers partitioned over the ranks (ZeRO stage 1).

    Every parameter has one owner. The owner applies the update and sends the new value to the others.
    """

    def __init__(self, params, lr, momentum=0.9, max_norm=1.0):
        self.params = [p for p in params if p.requires_grad]
        self.lr, self.momentum, self.max_norm = lr, momentum, max_norm
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        load = [0] * self.world
        self.owner = {}
        for p in sorted(self.params, key=lambda q: -q.numel()):
            r = load.index(min(load))
            self.owner[p] = r
            load[r] += p.numel()
        self.owned = [p for p in self.params if self.owner[p] == self.rank]
        self.buf = {p: torch.zeros_like(p) for p in self.owned}

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        grads = [p.grad for p in self.params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in self.owned:
            if p.grad is None:
                continue
            self.buf[p].mul_(self.momentum).add_(p.grad * scale)
            p.add_(self.buf[p], alpha=-self.lr)
        for p in self.params:
            dist.broadcast(p.data, src=self.owner[p])
        return norm


class Net(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        h = F.gelu(self.stem(x))
        for b in self.blocks:
            h = h + F.gelu(b(h))
        return self.head(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--clip", type=float, default=0.5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, test = TensorDataset(x[:1280], y[:1280]), (x[1280:], y[1280:])
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=args.global_batch // world, sampler=sampler)

    model = DDP(Net())
    opt = PartitionedSGD(model.parameters(), args.lr, max_norm=args.clip)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (xb, yb) in enumerate(loader):
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            norm = opt.step()
            if rank == 0 and i % 10 == 0:
                print(f"epoch {epoch} it {i} loss {loss.item():.4f} gnorm {norm.item():.3f}")
    if rank == 0:
        with torch.no_grad():
            acc = (model.module(test[0]).argmax(1) == test[1]).float().mean()
        print(f"test accuracy {acc.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
