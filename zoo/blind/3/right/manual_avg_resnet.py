"""Residual CNN on 8x8 digits. No DDP wrapper, gradients travel in one flat buffer."""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.set_num_threads(1)


class ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, ch)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, ch)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


class SmallResNet(nn.Module):
    def __init__(self, ch=16, blocks=2, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.body = nn.Sequential(*[ResBlock(ch) for _ in range(blocks)])
        self.head = nn.Linear(ch, classes)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def sync_weights(model):
    for t in list(model.parameters()) + list(model.buffers()):
        dist.broadcast(t.data, src=0)


def reduce_grads(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    at = 0
    for g in grads:
        g.copy_(flat[at:at + g.numel()].view_as(g))
        at += g.numel()


def rate_at(samples, total, peak):
    warm = 0.1 * total
    if samples < warm:
        return peak * (samples + 1) / warm
    return 0.5 * peak * (1 + math.cos(math.pi * (samples - warm) / (total - warm)))


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64)
    mine = torch.arange(rank, len(x), world)
    for idx in mine.split(64):
        out = model(x[idx])
        stats[0] += F.cross_entropy(out, y[idx], reduction="sum").double()
        stats[1] += (out.argmax(1) == y[idx]).sum()
        stats[2] += len(idx)
    dist.all_reduce(stats)
    model.train()
    return stats[0].item() / stats[2].item(), stats[1].item() / stats[2].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--global-batch", type=int, default=96)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--wd", type=float, default=5e-4)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    y = torch.tensor(digits.target)
    xtr, ytr, xva, yva = x[:1400], y[:1400], x[1400:], y[1400:]

    torch.manual_seed(args.seed)
    model = SmallResNet()
    sync_weights(model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.SGD(
        [{"params": decay, "weight_decay": args.wd}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr, momentum=0.9, nesterov=True)

    total = args.epochs * len(xtr)
    seen = 0
    order_gen = torch.Generator().manual_seed(args.seed)
    for epoch in range(args.epochs):
        perm = torch.randperm(len(xtr), generator=order_gen)
        running = torch.zeros(1)
        for batch in perm.split(args.global_batch):
            for g in opt.param_groups:
                g["lr"] = rate_at(seen, total, args.lr)
            mine = batch[rank::world]
            loss = F.cross_entropy(model(xtr[mine]), ytr[mine], reduction="sum") / len(batch)
            opt.zero_grad()
            loss.backward()
            reduce_grads(model)
            opt.step()
            seen += len(batch)
            running += loss.detach() * len(batch)
        dist.all_reduce(running)
        vloss, vacc = evaluate(model, xva, yva, rank, world)
        if rank == 0:
            print(f"epoch {epoch} train {running.item() / len(xtr):.5f} val {vloss:.5f} acc {vacc:.4f} lr {opt.param_groups[0]['lr']:.4f}")

    if rank == 0:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "seen": seen}, os.path.join(os.environ.get("TMPDIR", "/tmp"), "manual_avg_resnet.pt"))
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
