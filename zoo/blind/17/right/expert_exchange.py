import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DIM, HIDDEN, EXPERTS, TOP = 16, 24, 8, 2
LOCAL = EXPERTS // world


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.send, ctx.receive = send, receive
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x / world
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return MeanOverRanks.forward(None, grad)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = torch.empty(EXPERTS, DIM, HIDDEN), torch.empty(EXPERTS, HIDDEN, DIM)
        for e in range(EXPERTS):
            g = torch.Generator().manual_seed(500 + e)
            up[e].normal_(0, DIM ** -0.5, generator=g)
            down[e].normal_(0, HIDDEN ** -0.5, generator=g)
        mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
        self.up, self.down = nn.Parameter(up[mine].clone()), nn.Parameter(down[mine].clone())

    def forward(self, x, which):
        out = torch.zeros_like(x)
        for e in range(LOCAL):
            rows = (which == e).nonzero().squeeze(1)
            out = out.index_add(0, rows, F.gelu(x[rows] @ self.up[e]) @ self.down[e])
        return out


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, chosen = probs.topk(TOP, dim=-1)
        gate = gate / gate.sum(-1, keepdim=True)
        share = torch.zeros(EXPERTS).index_add_(0, chosen.flatten(), torch.ones(chosen.numel()))
        if world > 1:
            dist.all_reduce(share)
        balance = EXPERTS * (share / share.sum() * MeanOverRanks.apply(probs.mean(0))).sum()

        order = chosen.flatten().argsort(stable=True)
        tokens, which = x[order // TOP], chosen.flatten()[order]
        if world > 1:
            counts = torch.bincount(which // LOCAL, minlength=world)
            incoming = torch.empty_like(counts)
            dist.all_to_all_single(incoming, counts)
            send, receive = counts.tolist(), incoming.tolist()
            there = Exchange.apply(which, send, receive) - rank * LOCAL
            back = Exchange.apply(self.experts(Exchange.apply(tokens, send, receive), there), receive, send)
        else:
            back = self.experts(tokens, which)
        return torch.zeros_like(x).index_add(0, order // TOP, back * gate.flatten()[order][:, None]), balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.norm, self.out = nn.Linear(6, DIM), MoE(), nn.LayerNorm(DIM), nn.Linear(DIM, 1)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        y, balance = self.moe(h)
        return self.out(self.norm(h + y)).squeeze(-1), balance


def finish_gradients(model, limit):
    square = {True: torch.zeros(()), False: torch.zeros(())}
    for name, p in model.named_parameters():
        sharded = "experts" in name
        if world > 1 and not sharded:
            dist.all_reduce(p.grad)
        p.grad /= world
        square[sharded] += p.grad.square().sum()
    if world > 1:
        dist.all_reduce(square[True])
    norm = (square[True] + square[False]).sqrt()
    for p in model.parameters():
        p.grad *= torch.clamp(limit / (norm + 1e-6), max=1.0)


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return x, torch.where(x[:, 0] > 0, torch.sin(2 * x[:, 1]), x[:, 2] * x[:, 3]) + torch.where(x[:, 4] > 0.5, x[:, 5], 0.0)


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    (x, y), (vx, vy) = dataset(1024, 1), dataset(256, 2)
    for epoch in range(4):
        seen = torch.zeros(3)
        for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(64):
            prediction, balance = model(x[rows[rank::world]])
            loss = F.huber_loss(prediction, y[rows[rank::world]])
            optimizer.zero_grad()
            (loss + 0.02 * balance).backward()
            finish_gradients(model, 0.5)
            optimizer.step()
            seen[:2] += torch.stack([loss, balance]).detach() * 64 / len(x)
        with torch.no_grad():
            seen[2] = F.huber_loss(model(vx[rank::world])[0], vy[rank::world])
        if world > 1:
            dist.all_reduce(seen)
        if rank == 0:
            print("epoch %d loss %.5f balance %.5f valid %.5f" % (epoch, *(seen / world).tolist()))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
