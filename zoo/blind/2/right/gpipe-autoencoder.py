"""Denoising autoencoder cut into stages, one per process, trained with GPipe micro-batches."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def block(i, o):
    return nn.Sequential(nn.Linear(i, o), nn.LayerNorm(o), nn.GELU())


def full_model():
    torch.manual_seed(31)
    return nn.Sequential(block(64, 56), block(56, 32), nn.Linear(32, 12), block(12, 32), block(32, 56), nn.Linear(56, 64))


def clip_global(params, limit):
    sq = sum(p.grad.square().sum() for p in params)
    dist.all_reduce(sq)
    norm = sq.sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.mul_(factor)
    return norm


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--noise", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=4e-3)
    a = ap.parse_args()
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = list(full_model())
    cut = [round(i * len(layers) / world) for i in range(world + 1)]
    part = nn.Sequential(*layers[cut[rank]:cut[rank + 1]])
    first, last = rank == 0, rank == world - 1
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=a.micro, loss_fn=F.mse_loss)
    opt = torch.optim.NAdam(part.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, test = x[:960], x[960:960 + 240]
    for epoch in range(a.epochs):
        g = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(train), generator=g)
        total = 0.0
        part.train()
        for idx in order.split(a.batch):
            clean = train[idx]
            noisy = clean + a.noise * torch.randn(clean.shape, generator=g)
            opt.zero_grad()
            losses = []
            schedule.step(*([noisy] if first else []), **({"target": clean, "losses": losses} if last else {}))
            norm = clip_global(list(part.parameters()), 1.0)
            opt.step()
            sched.step()
            total += sum(l.item() for l in losses) / a.micro
        part.eval()
        err = torch.zeros(2)
        for clean in test.split(a.batch):
            out = schedule.eval(*([clean] if first else []), **({"target": clean} if last else {}))
            if last:
                err += torch.tensor([F.mse_loss(out, clean, reduction="sum").item(), clean.numel()])
        if last:
            steps = len(train) // a.batch
            print(f"epoch {epoch} train mse {total / steps:.5f} test mse {err[0] / err[1]:.5f} norm {norm:.4f}")
    pieces = [None] * world
    state = {f"{cut[rank] + int(k.split('.', 1)[0])}.{k.split('.', 1)[1]}": v for k, v in part.state_dict().items()}
    dist.all_gather_object(pieces, state)
    if first:
        merged = {k: v for p in pieces for k, v in p.items()}
        full_model().load_state_dict(merged)
        torch.save(merged, "/tmp/denoiser.pt")
        print(f"wrote {len(merged)} tensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
