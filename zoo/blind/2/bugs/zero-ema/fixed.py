import argparse
import copy
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn


class PartitionedAdamW:
    """Every rank keeps Adam moments for its own subset of the parameters only."""

    def __init__(self, params, lr, weight_decay):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        load = [0] * self.world
        self.owner = []
        for p in self.params:
            r = load.index(min(load))
            load[r] += p.numel()
            self.owner.append(r)
        mine = [p for p, r in zip(self.params, self.owner) if r == self.rank]
        self.inner = torch.optim.AdamW(mine, lr=lr, weight_decay=weight_decay)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def reduce_grads(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.world

    def step(self):
        self.inner.step()

    @torch.no_grad()
    def gather_params(self):
        for p, r in zip(self.params, self.owner):
            dist.broadcast(p.data, src=r)


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def autoencoder():
    return nn.Sequential(
        nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 12),
        nn.GELU(), nn.Linear(12, 96), nn.GELU(), nn.Linear(96, 64),
    )


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=64, help="global batch")
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--ema", type=float, default=0.8)
    ap.add_argument("--out", default="out")
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, val = data[:1024], data[1024:1536]

    model = autoencoder()
    ema = EMA(model, args.ema)
    opt = PartitionedAdamW(model.parameters(), args.lr, 0.01)

    for epoch in range(args.epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for i in range(0, len(train), args.batch):
            idx = order[i:i + args.batch][rank::world]
            x = train[idx]
            loss = (model(x) - x).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.reduce_grads()
            opt.step()
            opt.gather_params()
            ema.update(model)
        if rank == 0:
            with torch.no_grad():
                live = (model(val) - val).pow(2).mean().item()
                smooth = (ema.model(val) - val).pow(2).mean().item()
            print(f"epoch {epoch}: val mse {live:.6f}, ema {smooth:.6f}", flush=True)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save({"model": model.state_dict(), "ema": ema.model.state_dict()}, os.path.join(args.out, "last.pt"))
    dist.barrier()
    dist.destroy_process_group()
