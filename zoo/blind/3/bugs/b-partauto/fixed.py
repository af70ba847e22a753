"""Denoising autoencoder; the AdamW state is divided over the processes, every owner sends its tensors back."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.set_num_threads(1)


class AutoEncoder(nn.Module):
    def __init__(self, mean, hidden=96, code=16):
        super().__init__()
        self.register_buffer("mean", mean)
        self.enc = nn.Linear(64, hidden)
        self.code = nn.Linear(hidden, code)
        self.dec = nn.Linear(code, hidden)
        self.out = nn.Linear(hidden, 64, bias=False)

    def forward(self, x):
        z = self.code(F.silu(self.enc(x - self.mean)))
        return self.out(F.silu(self.dec(z))) + self.mean


class PartitionedAdamW:
    def __init__(self, params, lr, weight_decay):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.per_rank = (len(self.params) + self.world - 1) // self.world
        self.local = torch.optim.AdamW(self.owned_by(self.rank), lr=lr, weight_decay=weight_decay)

    def owned_by(self, rank):
        return self.params[rank * self.per_rank:(rank + 1) * self.per_rank]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def average_gradients(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for p in self.params:
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
            offset += p.numel()

    @torch.no_grad()
    def step(self):
        self.average_gradients()
        self.local.step()
        for owner in range(self.world):
            for p in self.owned_by(owner):
                dist.broadcast(p, src=owner)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--noise", type=float, default=0.2)
    ap.add_argument("--dir", default="ae_run")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    g = torch.Generator().manual_seed(21)
    x = x[torch.randperm(len(x), generator=g)]
    train, test = x[:1152], x[1152:1552]
    noisy_train = train + args.noise * torch.randn(train.shape, generator=g)
    noisy_test = test + args.noise * torch.randn(test.shape, generator=g)

    torch.manual_seed(6)
    model = AutoEncoder(train.mean(0))
    opt = PartitionedAdamW(model.parameters(), args.lr, 0.01)

    for epoch in range(args.epochs):
        order = torch.randperm(len(train), generator=g)
        total = torch.zeros(1)
        for ids in order.split(args.batch):
            ids = ids[rank::world]
            loss = F.mse_loss(model(noisy_train[ids]), train[ids])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(ids)
        dist.all_reduce(total)
        with torch.no_grad():
            err = F.mse_loss(model(noisy_test), test).item()
        if rank == 0:
            print(f"epoch {epoch}: train mse {total.item() / len(train):.5f}  test mse {err:.5f}", flush=True)

    os.makedirs(args.dir, exist_ok=True)
    torch.save(opt.local.state_dict(), os.path.join(args.dir, f"adamw_{rank}_of_{world}.pt"))
    if rank == 0:
        torch.save(model.state_dict(), os.path.join(args.dir, "model.pt"))
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
