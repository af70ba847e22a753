"""Mixture of experts on digits: experts live on different processes, tokens travel by all_to_all."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

EXPERTS, DIM = 4, 32


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.send, ctx.receive)
        return back, None, None


class Expert(nn.Module):
    def __init__(self, number):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(300 + number)
            self.net = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM))

    def forward(self, x):
        return self.net(x)


class MoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.world, self.per = world, EXPERTS // world
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.local = nn.ModuleList(Expert(rank * self.per + i) for i in range(self.per))

    def forward(self, x):
        probs = self.router(x).softmax(1)
        gate, choice = probs.max(1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=EXPERTS)
        per_rank = [torch.empty_like(counts) for _ in range(self.world)]
        dist.all_gather(per_rank, counts)
        table = torch.stack(per_rank)
        low = dist.get_rank() * self.per
        send = counts.view(self.world, self.per).sum(1).tolist()
        inbound = table[:, low:low + self.per]
        receive = inbound.sum(1).tolist()
        tokens = Exchange.apply(x[order], send, receive)
        label = torch.cat([torch.arange(self.per).repeat_interleave(row) for row in inbound])
        done = torch.zeros_like(tokens)
        for i, expert in enumerate(self.local):
            place = (label == i).nonzero().squeeze(1)
            done = done.index_add(0, place, expert(tokens[place]))
        home = Exchange.apply(done, receive, send)
        y = torch.zeros_like(x).index_copy(0, order, home)
        share = table.sum(0) / table.sum()
        balance = EXPERTS * (share * probs.mean(0)).sum()
        return x + gate[:, None] * y, balance


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem, self.moe, self.head = nn.Linear(64, DIM), MoE(rank, world), nn.Linear(DIM, 10)

    def forward(self, x):
        h, balance = self.moe(F.relu(self.stem(x)))
        return self.head(h), balance


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=128)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    torch.manual_seed(4)
    net = Net(rank, world)
    experts = [n for n, _ in net.named_parameters() if ".local." in n]
    DDP._set_params_and_buffers_to_ignore_for_model(net, experts)
    ddp = DDP(net)
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(10)
    for step in range(args.steps):
        mine = torch.randperm(len(x), generator=g)[:args.batch].chunk(world)[rank]
        logits, balance = ddp(x[mine])
        loss = F.cross_entropy(logits, y[mine]) + 0.02 * balance
        opt.zero_grad()
        loss.backward()
        for p in net.moe.local.parameters():
            if p.grad is not None:
                p.grad /= world
        opt.step()
        if step % 10 == 9:
            log = torch.stack([loss.detach(), (logits.argmax(1) == y[mine]).float().mean()])
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {step + 1} loss {log[0] / world:.4f} accuracy {log[1] / world:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
