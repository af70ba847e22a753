"""Mixture of experts, experts spread over the ranks, tokens travel by all-to-all. Everything else is data parallel."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.send, ctx.recv = send, recv
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, g):
        out = g.new_empty(sum(ctx.send), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), ctx.send, ctx.recv)
        return out, None, None


class MoE(nn.Module):
    def __init__(self, dim, hidden, n_experts):
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.n, self.per = n_experts, n_experts // self.world
        self.router = nn.Linear(dim, n_experts, bias=False)
        every = [nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(n_experts)]
        self.experts = nn.ModuleList(every[self.rank * self.per:(self.rank + 1) * self.per])

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=self.n)
        # counts[e] tokens go to expert e; learn how many come for each of my experts from each rank
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        theirs = theirs.view(self.world, self.per)
        send = counts.view(self.world, self.per).sum(1).tolist()
        recv = theirs.sum(1).tolist()
        got = Exchange.apply(x[order], send, recv)
        label = torch.arange(self.per).repeat(self.world).repeat_interleave(theirs.flatten())
        done = torch.zeros_like(got)
        for e, expert in enumerate(self.experts):
            rows = (label == e).nonzero().squeeze(1)
            done = done.index_add(0, rows, expert(got[rows]))
        back = Exchange.apply(done, recv, send)
        out = torch.zeros_like(x).index_copy(0, order, back)

        share = counts.float()
        dist.all_reduce(share)
        aux = self.n * (share / share.sum() * probs.mean(0)).sum()
        return x + gate[:, None] * out, aux


class Net(nn.Module):
    def __init__(self, dim=32, n_experts=4):
        super().__init__()
        self.inp = nn.Linear(64, dim)
        self.head = nn.Linear(dim, 10)
        self.norm = nn.LayerNorm(dim)
        self.moe = MoE(dim, 64, n_experts)

    def forward(self, x):
        h, aux = self.moe(self.norm(F.relu(self.inp(x))))
        return self.head(h), aux


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--aux", type=float, default=0.02)
    ap.add_argument("--clip", type=float, default=1.0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)

    torch.manual_seed(42)
    net = Net()
    own = [p for n, p in net.named_parameters() if ".experts." in n]
    shared = [p for n, p in net.named_parameters() if ".experts." not in n]
    opt = torch.optim.Adam(shared + own, lr=args.lr, eps=1e-6)
    gen = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        idx = torch.randint(0, 1440, (args.global_batch,), generator=gen).tensor_split(world)[rank]
        logits, aux = net(x[idx])
        loss = F.cross_entropy(logits, y[idx]) + args.aux * aux
        opt.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
            p.grad /= world
        for p in own:
            # tokens of all ranks have already met here
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / world
        sq = sum(p.grad.pow(2).sum() for p in own)
        dist.all_reduce(sq)
        norm = (sq + sum(p.grad.pow(2).sum() for p in shared)).sqrt()
        scale = (args.clip / (norm + 1e-6)).clamp(max=1.0)
        for p in shared + own:
            p.grad *= scale
        opt.step()
        if step % 10 == 9:
            v = loss.detach() / world
            dist.all_reduce(v)
            if rank == 0:
                print(f"step {step + 1} loss {v.item():.5f} norm {norm.item():.4f}")

    with torch.no_grad():
        tx, ty = x[1440:].tensor_split(world)[rank], y[1440:].tensor_split(world)[rank]
        hit = torch.tensor([(net(tx)[0].argmax(1) == ty).sum().item(), len(ty)])
    dist.all_reduce(hit)
    pieces = [None] * world if rank == 0 else None
    dist.gather_object([e.state_dict() for e in net.moe.experts], pieces, dst=0)
    if rank == 0:
        state = {k: v for k, v in net.state_dict().items() if ".experts." not in k}
        experts = [sd for piece in pieces for sd in piece]
        torch.save({"shared": state, "experts": experts}, "/tmp/moe_expert_parallel.pt")
        print(f"accuracy {hit[0].item() / hit[1].item():.4f}, saved {len(experts)} experts")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
