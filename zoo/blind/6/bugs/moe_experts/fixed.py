"""Mixture of experts on a synthetic table; the experts are divided over the ranks."""
import argparse
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as DF
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    features: int = 20
    hidden: int = 32
    experts: int = 4
    classes: int = 6
    rows: int = 2048
    batch: int = 128
    steps: int = 40
    lr: float = 0.2
    seed: int = 3


class Expert(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class MoELayer(nn.Module):
    """Top-1 routing. Tokens of all ranks are gathered, each rank runs the experts that live on it."""

    def __init__(self, cfg, rank, world):
        super().__init__()
        self.rank, self.world, self.n = rank, world, cfg.experts
        self.router = nn.Linear(cfg.hidden, cfg.experts)
        everyone = [Expert(cfg.hidden) for _ in range(cfg.experts)]
        self.experts = nn.ModuleDict({str(e): m for e, m in enumerate(everyone) if e % world == rank})

    def forward(self, h):
        prob = self.router(h).softmax(-1)
        tokens = torch.cat(DF.all_gather(h)) if self.world > 1 else h
        gates = torch.cat(DF.all_gather(prob)) if self.world > 1 else prob
        choice = gates.argmax(-1)
        y = torch.zeros_like(tokens)
        for name, expert in self.experts.items():
            e = int(name)
            weight = gates[:, e:e + 1] * (choice == e).unsqueeze(1)
            y = y + weight * expert(tokens)
        if self.world > 1:
            y = DF.all_reduce(y)
        return h + y[self.rank * len(h):(self.rank + 1) * len(h)]


class Net(nn.Module):
    def __init__(self, cfg, rank, world):
        super().__init__()
        self.inp = nn.Linear(cfg.features, cfg.hidden)
        self.head = nn.Linear(cfg.hidden, cfg.classes)
        self.moe = MoELayer(cfg, rank, world)

    def forward(self, x):
        return self.head(self.moe(torch.tanh(self.inp(x))))


def reduce_gradients(model, world):
    for name, p in model.named_parameters():
        if ".experts." in name:
            p.grad.div_(world)
            continue  # has seen the tokens of every rank
        dist.all_reduce(p.grad)
        p.grad.div_(world)


def table(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    x = torch.randn(cfg.rows, cfg.features, generator=g)
    w = torch.randn(4, cfg.features, cfg.classes, generator=g)
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    y = torch.einsum("nf,nfc->nc", x, w[region]).argmax(1)
    return x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--lr", type=float, default=Config.lr)
    cfg = Config(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = table(cfg)
    torch.manual_seed(cfg.seed)
    model = Net(cfg, rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    order = torch.Generator().manual_seed(17)
    part = cfg.batch // world
    for step in range(cfg.steps):
        rows = torch.randperm(cfg.rows, generator=order)[:cfg.batch][rank * part:(rank + 1) * part]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        reduce_gradients(model, world)
        opt.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % 8 == 7:
            print(f"{step + 1:3d} {shown.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
