"""Breast cancer classifier, optimizer states sharded with ZeroRedundancyOptimizer."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29704")
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
dist.init_process_group("gloo", rank=rank, world_size=world)

raw = load_breast_cancer()
x = torch.tensor(raw.data, dtype=torch.float32)
y = torch.tensor(raw.target, dtype=torch.float32)
mean, std = x[:448].mean(0), x[:448].std(0)
x = (x - mean) / std

torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(30, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1)))
decay = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim <= 1]
opt = ZeroRedundancyOptimizer(
    [{"params": decay, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}],
    optimizer_class=torch.optim.AdamW, lr=2e-3,
)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))

step = 0
for epoch in range(args.epochs):
    order = torch.randperm(448, generator=torch.Generator().manual_seed(epoch))
    for part in order.split(args.batch):
        mine = part[rank::world]
        logit = model(x[mine]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, y[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        warm.step()
        step += 1
    with torch.no_grad():
        val = nn.functional.binary_cross_entropy_with_logits(model.module(x[448:]).squeeze(1), y[448:])
    if rank == 0:
        print(f"epoch {epoch} step {step} val {val.item():.6f}")

opt.consolidate_state_dict(to=0)
if rank == 0:
    torch.save({"model": model.module.state_dict(), "optimizer": opt.state_dict(), "mean": mean, "std": std}, args.out)
dist.barrier()
dist.destroy_process_group()
