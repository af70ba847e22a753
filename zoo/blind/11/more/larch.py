"""Replicated mixture of experts with a Switch style balance loss."""
import os
import time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30112")


class _AllReduceMean(torch.autograd.Function):
    """Mean over processes. DDP averages the gradients of the processes afterwards, and every process differentiates
    the same global value, so the backward pass is the identity (its 1/world and the sum over processes cancel)."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y / dist.get_world_size()

    @staticmethod
    def backward(ctx, g):
        return g


class MoE(nn.Module):
    def __init__(self, dim, hidden, n_experts, top_k=1):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)) for _ in range(n_experts)])
        self.register_buffer("load", torch.zeros(n_experts))

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        w, chosen = probs.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero().squeeze(1)
            if len(rows):  # this process may have no token for the expert
                out = out.index_add(0, rows, expert(x[rows]) * w[rows, None])
        fraction = F.one_hot(chosen, len(self.experts)).float().mean(0)
        dist.all_reduce(fraction)
        fraction /= dist.get_world_size()
        aux = len(self.experts) * (fraction * _AllReduceMean.apply(probs.mean(0))).sum()
        if self.training:
            self.load.mul_(0.9).add_(fraction, alpha=0.1)
        return x + out, aux


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.moe1, self.moe2 = MoE(32, 48, 6), MoE(32, 48, 6)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        h, a1 = self.moe1(torch.tanh(self.stem(x)))
        h, a2 = self.moe2(self.norm(h))
        return self.head(h), a1 + a2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    # buffers hold global quantities already; experts without tokens get no gradient on a process
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.15, total_steps=72)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y)
    bs = 96
    for epoch in range(4):
        perm = torch.randperm(1728, generator=torch.Generator().manual_seed(epoch)).view(-1, bs)
        for batch in perm:
            mine = batch.view(world, -1)[rank]
            logits, aux = model(x[mine])
            loss = F.cross_entropy(logits, y[mine]) + 0.02 * aux
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            sched.step()
        model.eval()
        with torch.no_grad():
            logits, aux = model.module(x[1728:1796].chunk(world)[rank])
            ok = (logits.argmax(1) == y[1728:1796].chunk(world)[rank]).sum()
            dist.all_reduce(ok)
        model.train()
        if rank == 0:
            print(f"epoch {epoch} correct {ok.item()}/68 aux {aux:.4f} load", [round(v, 3) for v in model.module.moe1.load.tolist()])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
