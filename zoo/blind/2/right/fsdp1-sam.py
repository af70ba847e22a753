"""Sharpness-aware minimisation on FSDP with wrapped blocks."""
import argparse
import functools
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(x)


class Net(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.inp = nn.Linear(64, d)
        self.blocks = nn.Sequential(Residual(d), Residual(d))
        self.out = nn.Linear(d, 10)

    def forward(self, x):
        return self.out(self.blocks(F.gelu(self.inp(x))))


class SAM:
    def __init__(self, model, base, rho=0.05):
        self.model, self.base, self.rho = model, base, rho
        self.params = [p for p in model.parameters() if p.requires_grad]

    @torch.no_grad()
    def ascend(self):
        sq = sum((p.grad.square().sum() for p in self.params if p.grad is not None), torch.zeros(()))
        dist.all_reduce(sq)
        scale = self.rho / (sq.sqrt() + 1e-12)
        self.moves = [None if p.grad is None else p.grad * scale for p in self.params]
        for p, e in zip(self.params, self.moves):
            if e is not None:
                p.add_(e)
        self.base.zero_grad()
        return sq.sqrt()

    @torch.no_grad()
    def restore(self):
        for p, e in zip(self.params, self.moves):
            if e is not None:
                p.sub_(e)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=30)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--rho", type=float, default=0.05)
    a = ap.parse_args()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    train = TensorDataset(x[:1020], y[:1020])
    sampler = DistributedSampler(train, seed=13, drop_last=True)
    loader = DataLoader(train, a.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(13 + 7 * rank)
    net = Net()
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Residual}), sharding_strategy=ShardingStrategy.FULL_SHARD,
                 device_id=torch.device("cpu"), use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs * len(loader))
    sam = SAM(model, opt, a.rho)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2, dtype=torch.float64)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            norm = sam.ascend()
            F.cross_entropy(model(xb), yb).backward()
            sam.restore()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
            sched.step()
            seen += torch.tensor([loss.item() * len(xb), len(xb)])
        with torch.no_grad():
            size = -(-(len(x) - 1020) // world)
            part = slice(1020 + rank * size, min(len(x), 1020 + (rank + 1) * size))
            good = (model(x[part]).argmax(1) == y[part]).sum()
        res = torch.cat([seen, torch.tensor([good, part.stop - part.start], dtype=torch.float64)])
        dist.all_reduce(res)
        if rank == 0:
            print(f"epoch {epoch} loss {res[0] / res[1]:.4f} first-pass norm {norm:.3f} test acc {res[2] / res[3]:.4f} ({int(res[3])})")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, "/tmp/fsdp_sam.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
