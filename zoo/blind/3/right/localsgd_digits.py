"""Local SGD (Stich 2019): after a synchronous warm-up each worker takes H steps alone, then weights and momenta are averaged.

Between two averaging points the replicas are different on purpose."""
import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mean_over_workers(tensors, world):
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    flat /= world
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


class LocalSGD:
    def __init__(self, model, opt, warmup, period):
        self.model, self.opt, self.warmup, self.period = model, opt, warmup, period
        self.world = dist.get_world_size()
        self.t = 0
        self.rounds = 0

    @torch.no_grad()
    def step(self):
        params = list(self.model.parameters())
        if self.t < self.warmup:
            mean_over_workers([p.grad for p in params], self.world)
        self.opt.step()
        self.t += 1
        if self.t >= self.warmup and (self.t - self.warmup) % self.period == 0 and self.t > self.warmup:
            self.average()

    @torch.no_grad()
    def average(self):
        params = list(self.model.parameters())
        mean_over_workers(params, self.world)
        mean_over_workers([self.opt.state[p]["momentum_buffer"] for p in params], self.world)
        self.rounds += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--warmup-steps", type=int, default=6)
    ap.add_argument("--local-steps", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.08)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    ds = TensorDataset(x[:1408], y[:1408])
    sampler = DistributedSampler(ds, seed=3)
    loader = DataLoader(ds, args.batch_size, sampler=sampler)

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 40), nn.ReLU(), nn.Linear(40, 10))
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    algo = LocalSGD(net, opt, args.warmup_steps, args.local_steps)
    loss_fn = nn.CrossEntropyLoss()
    if rank == 0:
        print(f"local SGD: {args.warmup_steps} synchronous steps, then averaging every {args.local_steps} steps over {world} workers")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad(set_to_none=False)
            loss = loss_fn(net(xb), yb)
            loss.backward()
            algo.step()
        algo.average()  # evaluate and store the consensus model only
        with torch.no_grad():
            tx, ty = x[1408 + rank::world], y[1408 + rank::world]
            c = torch.tensor([(net(tx).argmax(1) == ty).sum().item(), len(ty)])
        dist.all_reduce(c)
        if rank == 0:
            print(f"epoch {epoch}: {algo.t} steps, {algo.rounds} averaging rounds, accuracy {c[0].item() / c[1].item():.4f}")
    if rank == 0:
        torch.save(net.state_dict(), "/tmp/localsgd_digits.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
