"""Mixture of experts with expert parallelism: tokens travel to the rank that owns their expert and back."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
RANK, WORLD = dist.get_rank(), dist.get_world_size()
EXPERTS, DIM, TASKS, LENGTH = 8, 24, 6, 5
LOCAL = EXPERTS // WORLD


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.sizes = send, recv
        out = x.new_empty(sum(recv), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, recv = ctx.sizes
        back = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(back, grad.contiguous(), send, recv)
        return back, None, None


class Expert(nn.Module):
    def __init__(self, number):
        super().__init__()
        g = torch.Generator().manual_seed(500 + number)
        self.w1 = nn.Parameter(torch.randn(DIM, 2 * DIM, generator=g) / DIM ** 0.5)
        self.w2 = nn.Parameter(torch.randn(2 * DIM, DIM, generator=g) / (2 * DIM) ** 0.5)

    def forward(self, x):
        return F.silu(x @ self.w1) @ self.w2


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert(e) for e in range(RANK * LOCAL, (RANK + 1) * LOCAL)})

    def forward(self, x, total):
        """x: local tokens; total: tokens of all ranks.  Returns the output and this rank's part of the balance loss."""
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        load = torch.bincount(choice, minlength=EXPERTS)

        order = choice.argsort(stable=True)
        theirs = torch.empty_like(load)
        dist.all_to_all_single(theirs, load)
        send, recv = load.view(WORLD, LOCAL).sum(1).tolist(), theirs.view(WORLD, LOCAL).sum(1).tolist()
        arrived = Exchange.apply(x[order], send, recv)
        number = torch.arange(LOCAL).repeat(WORLD).repeat_interleave(theirs)
        done = torch.zeros_like(arrived)
        for k, expert in enumerate(self.experts.values()):
            rows = (number == k).nonzero().squeeze(1)
            done = done.index_add(0, rows, expert(arrived[rows]))
        home = Exchange.apply(done, recv, send)
        out = torch.zeros_like(x).index_copy(0, order, home) * gate[:, None]

        dist.all_reduce(load)
        balance = EXPERTS * ((load / total) * (probs.sum(0) / total)).sum()
        return out, balance, load


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TASKS, DIM)
        self.read = nn.Linear(3, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.moe = nn.ModuleList(MoE() for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def forward(self, task, x, total):
        h = self.embed(task) + self.read(x)
        balance, loads = 0.0, []
        for norm, moe in zip(self.norms, self.moe):
            y, b, load = moe(norm(h), total)
            h, balance = h + y, balance + b
            loads.append(load)
        return self.head(h).squeeze(-1), balance, loads


def batch(n, g):
    task = torch.randint(0, TASKS, (n,), generator=g)
    x = torch.randn(n, 3, generator=g)
    a, b, c = x.unbind(1)
    y = torch.stack([a * b, a + b - c, (a * 2).sin(), a.abs() - c, b * c, c.square() / 2])
    return task, x, y.gather(0, task[None]).squeeze(0)


def run(net, data, g=None):
    total = len(data[0])
    task, x, y = (t.tensor_split(WORLD)[RANK] for t in data)
    pred, balance, loads = net(task, x, total)
    return F.mse_loss(pred, y, reduction="sum") / total, balance, loads


torch.set_default_dtype(torch.float64)
torch.manual_seed(2)
net = Net()
shared = [p for n, p in net.named_parameters() if ".experts." not in n]
owned = [p for n, p in net.named_parameters() if ".experts." in n]
optim = torch.optim.Adam(net.parameters(), lr=4e-3)
stream = torch.Generator().manual_seed(3)
held = batch(203, torch.Generator().manual_seed(4))

for step in range(60):
    loss, balance, _ = run(net, batch(90, stream))
    optim.zero_grad()
    (loss + 0.01 * balance).backward()
    flat = torch.cat([p.grad.flatten() for p in shared])
    dist.all_reduce(flat)
    for p, piece in zip(shared, flat.split([p.numel() for p in shared])):
        p.grad = piece.view_as(p)
    squares = sum(p.grad.square().sum() for p in owned)
    dist.all_reduce(squares)
    norm = (squares + flat.square().sum()).sqrt()
    for p in net.parameters():
        p.grad.mul_((2.0 / norm).clamp(max=1.0))
    optim.step()
    if step % 20 == 19:
        with torch.no_grad():
            val, bal, loads = run(net, held)
            res = torch.stack([val, bal])
            dist.all_reduce(res)
        if RANK == 0:
            print(f"step {step + 1} mse {res[0]:.10f} balance {res[1]:.10f} grad {norm:.10f} load {loads[1].tolist()}")
dist.destroy_process_group()
