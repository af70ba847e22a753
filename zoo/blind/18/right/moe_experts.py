"""Mixture of experts for regression on regimes; every worker holds some of the experts."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

EXPERTS, TOP, WIDTH, BATCH = 8, 2, 24, 96


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def my_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def total(x):
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.send, ctx.receive = send, receive
        return exchange(x, send, receive)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.receive, ctx.send), None, None


def exchange(x, send, receive):
    if not dist.is_initialized():
        return x.clone()
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send)
    return out


class Expert(nn.Module):
    def __init__(self, number):
        super().__init__()
        gen = torch.Generator().manual_seed(500 + number)
        self.w1 = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, generator=gen) / WIDTH ** 0.5)
        self.w2 = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, generator=gen) / (2 * WIDTH) ** 0.5)

    def forward(self, x):
        return F.silu(x @ self.w1) @ self.w2


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.per = EXPERTS // world_size()
        self.experts = nn.ModuleList(Expert(my_rank() * self.per + i) for i in range(self.per))

    def forward(self, x, tokens):
        probs = self.router(x).softmax(-1)
        weight, choice = probs.topk(TOP, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)

        flat = choice.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)
        table = counts.view(world_size(), self.per)
        arriving = exchange(table, [1] * world_size(), [1] * world_size())
        send, receive = table.sum(1).tolist(), arriving.sum(1).tolist()

        inbox = Exchange.apply(x.repeat_interleave(TOP, 0)[order], send, receive)
        pieces = inbox.split(arriving.flatten().tolist())
        answers = [self.experts[i % self.per](piece) for i, piece in enumerate(pieces)]
        back = Exchange.apply(torch.cat(answers), receive, send)
        mixed = torch.zeros(len(flat), WIDTH).index_copy(0, order, back)
        y = (mixed.view(len(x), TOP, WIDTH) * weight.unsqueeze(-1)).sum(1)

        fraction = total(counts.to(x.dtype)) / (tokens * TOP)
        balance = EXPERTS * (fraction * probs.sum(0)).sum() / tokens
        return x + y, balance


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.moe = MoE()
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, tokens):
        h, balance = self.moe(torch.tanh(self.first(x)), tokens)
        return self.last(self.norm(h)).squeeze(-1), balance


def regimes(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=gen)
    kind = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    y = torch.stack([x[:, 2], -x[:, 3], x[:, 4].square() - 1, torch.sin(3 * x[:, 5])], 1)
    return x, y.gather(1, kind.unsqueeze(1)).squeeze(1)


def main():
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    rank, world = my_rank(), world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    net = Net()
    inside = set(net.moe.experts.parameters())
    common = [p for p in net.parameters() if p not in inside]
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    x, y = regimes(960, seed=1)

    for step in range(40):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:BATCH]
        mine = rows[rank::world]
        guess, balance = net(x[mine], BATCH)
        loss = (guess - y[mine]).square().sum() / BATCH + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        for p in common:
            total(p.grad)
        held = [p.grad for p in inside if p.grad is not None]
        square = total(sum((g.square().sum() for g in held), torch.zeros(())))
        square = square + sum(p.grad.square().sum() for p in common)
        factor = (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for p in net.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
        optimizer.step()

    test_x, test_y = regimes(200, seed=2)
    with torch.no_grad():
        guess, _ = net(test_x[rank::world], len(test_x))
        error = total((guess - test_y[rank::world]).square().sum()) / len(test_x)
        size = total(sum(p.square().sum() for p in inside))
    if rank == 0:
        print(f"test error {error.item():.10f}, experts' norm {size.sqrt().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
