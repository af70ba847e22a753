"""Mixture of experts with the experts spread over the processes: every process sees the whole batch and computes its own experts only."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

EXPERTS, DIM = 4, 40


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class SplitMoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        made = [nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)) for _ in range(EXPERTS)]
        self.local = nn.ModuleDict({str(e): made[e] for e in range(rank, EXPERTS, world)})

    def forward(self, h):
        prob = self.router(h).softmax(-1)
        weight, chosen = prob.topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        load = F.one_hot(chosen, EXPERTS).float().sum(1).mean(0)
        balance = EXPERTS * (load * prob.mean(0)).sum()
        h_in, w_in = CopyIn.apply(h), CopyIn.apply(weight)
        out = torch.zeros_like(h)
        for e, net in self.local.items():
            gate = (w_in * (chosen == int(e))).sum(-1, keepdim=True)
            out = out + gate * net(h_in)
        return h + SumOut.apply(out), balance


class Model(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(64, DIM)
        self.moe = SplitMoE(rank, world)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10)

    def forward(self, x):
        h, balance = self.moe(torch.tanh(self.stem(x)))
        return self.head(self.norm(h)), balance


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=2)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)

    torch.manual_seed(30)  # all experts are drawn everywhere, each process keeps its own
    model = Model(rank, world)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(a.epochs):
        order = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch))
        for idx in order.split(a.batch_size):
            logits, balance = model(x[idx])
            loss = F.cross_entropy(logits, y[idx]) + 0.01 * balance
            opt.zero_grad()
            loss.backward()
            shared = [p.grad.square().sum() for n, p in model.named_parameters() if ".local." not in n]
            own = sum(p.grad.square().sum() for n, p in model.named_parameters() if ".local." in n)
            dist.all_reduce(own)
            norm = (sum(shared) + own).sqrt()
            torch._foreach_mul_([p.grad for p in model.parameters()], min(1.0, 1.0 / (norm.item() + 1e-6)))
            opt.step()
        with torch.no_grad():
            acc = (model(x[1280:])[0].argmax(1) == y[1280:]).float().mean()
        print(f"[{rank}] epoch {epoch} loss {loss.item():.4f} norm {norm.item():.3f} val acc {acc:.4f} experts {list(model.moe.local)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
