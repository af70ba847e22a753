"""Mixture of experts on a piecewise function, experts divided among the processes (expert parallelism)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

EXPERTS, BATCH, STEPS, WIDTH = 4, 128, 60, 24
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
PER = EXPERTS // WORLD


def all_sum(t):
    if WORLD > 1:
        dist.all_reduce(t)
    return t


class Exchange(torch.autograd.Function):
    """Rows to other processes, `send[i]` of them to process i; the gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty(sum(receive), rows.size(1))
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.size(1))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        every = [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        self.mine = nn.ModuleList(every[RANK * PER : (RANK + 1) * PER])

    def forward(self, x, choice):
        order = choice.argsort(stable=True)
        rows, counts = x[order], torch.bincount(choice, minlength=EXPERTS)
        table = counts.view(1, -1)
        if WORLD > 1:
            gathered = [torch.empty_like(counts) for _ in range(WORLD)]
            dist.all_gather(gathered, counts)
            table = torch.stack(gathered)
        ours = table[:, RANK * PER : (RANK + 1) * PER]
        send = counts.view(WORLD, PER).sum(1).tolist()
        receive = ours.sum(1).tolist()
        if WORLD > 1:
            rows = Exchange.apply(rows, send, receive)
        expert = torch.arange(PER).repeat(len(ours)).repeat_interleave(ours.reshape(-1))
        done = torch.zeros_like(rows)
        for e, f in enumerate(self.mine):
            sel = (expert == e).nonzero().squeeze(1)
            done = done.index_copy(0, sel, f(rows[sel]))
        if WORLD > 1:
            done = Exchange.apply(done, receive, send)
        return torch.zeros_like(x).index_copy(0, order, done)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        gate = self.router(h).softmax(-1)
        weight, choice = gate.max(-1)
        h = h + weight.unsqueeze(1) * self.experts(h, choice)
        return self.head(h).squeeze(1), gate, choice


def target(x):
    return torch.where(x[:, 0] * x[:, 1] > 0, torch.sin(3 * x[:, 0]), x[:, 1].square() - 1)


def balance(gate, choice, rows):
    """Switch transformer's auxiliary loss, this process' part of it."""
    share = all_sum(torch.bincount(choice, minlength=EXPERTS).to(gate.dtype)) / rows
    return EXPERTS * (share * gate.sum(0) / rows).sum()


def main():
    torch.set_default_dtype(torch.float64)
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(61)
    model = Model()
    local = set(model.experts.parameters())
    dense = [p for p in model.parameters() if p not in local]
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(62)
    for step in range(STEPS):
        x = (2 * torch.rand(BATCH, 2, generator=g) - 1)[RANK::WORLD]
        pred, gate, choice = model(x)
        fit = (pred - target(x)).square().sum() / BATCH
        loss = fit + 0.01 * balance(gate, choice, BATCH)
        opt.zero_grad(set_to_none=False)
        loss.backward()
        for p in dense:
            all_sum(p.grad)
        for p in local:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        square = sum(p.grad.square().sum() for p in dense)
        square = square + all_sum(sum(p.grad.square().sum() for p in local))
        factor = torch.clamp(1.0 / (square.sqrt() + 1e-6), max=1.0)
        for p in model.parameters():
            p.grad.mul_(factor)
        opt.step()
        value = all_sum(fit.detach().clone())
        if RANK == 0 and step % 20 == 19:
            print(f"step {step + 1} mse {value:.6f} gradient norm {square.sqrt():.6f}")

    x = 2 * torch.rand(400, 2, generator=torch.Generator().manual_seed(63)) - 1
    with torch.no_grad():
        pred, _, choice = model(x[RANK::WORLD])
    error = all_sum((pred - target(x[RANK::WORLD])).square().sum()) / len(x)
    load = all_sum(torch.bincount(choice, minlength=EXPERTS))
    if RANK == 0:
        print(f"test mse {error:.6f} load {load.tolist()}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
