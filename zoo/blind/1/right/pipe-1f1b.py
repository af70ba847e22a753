"""Encoder stack cut into pipeline stages, 1F1B, clipping by the norm over all stages, checkpoint merged by name."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def build():
    torch.manual_seed(2)
    parts = [nn.Linear(8, 32)]
    for _ in range(4):
        parts.append(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True))
    parts.append(nn.Sequential(nn.Flatten(), nn.LayerNorm(256), nn.Linear(256, 10)))
    return nn.ModuleList(parts)


class Stage(nn.Module):
    def __init__(self, parts, lo, hi):
        super().__init__()
        self.parts = nn.ModuleDict({str(i): parts[i] for i in range(lo, hi)})

    def forward(self, x):
        for p in self.parts.values():
            x = p(x)
        return x


def clip_over_stages(params, limit):
    total = sum(p.grad.square().sum() for p in params)
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.mul_(scale)
    return norm.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=48, help="one pipeline, one batch")
    ap.add_argument("--chunks", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == world - 1

    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32) / 16, torch.tensor(d.target)
    n = 960
    parts = build()
    cuts = [round(i * len(parts) / world) for i in range(world + 1)]
    module = Stage(parts, cuts[rank], cuts[rank + 1])
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    sched = Schedule1F1B(stage, a.chunks, loss_fn=F.cross_entropy)
    params = list(module.parameters())
    opt = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01)
    steps = a.epochs * (n // a.batch_size)
    lr = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))

    g = torch.Generator().manual_seed(6)
    for epoch in range(a.epochs):
        for idx in torch.randperm(n, generator=g).split(a.batch_size):
            losses = []
            feed = (x[idx],) if first else ()
            if last:
                sched.step(*feed, target=y[idx], losses=losses)
            else:
                sched.step(*feed)
            norm = clip_over_stages(params, 1.0)
            opt.step()
            opt.zero_grad()
            lr.step()
        if last:
            print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.4f} norm {norm:.3f}", flush=True)

    pieces = [None] * world
    dist.all_gather_object(pieces, module.state_dict())
    if first:
        merged = {k: v for piece in pieces for k, v in piece.items()}
        whole = Stage(build(), 0, len(parts))
        whole.load_state_dict(merged)
        whole.eval()
        with torch.no_grad():
            acc = (whole(x[n:]).argmax(1) == y[n:]).float().mean()
        os.makedirs("runs", exist_ok=True)
        torch.save(merged, "runs/pipe.pt")
        print(f"merged {len(merged)} tensors, val acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
