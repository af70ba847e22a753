import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distF
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)

GLOBAL_BATCH = 64
EPOCHS = 2
LR = 2e-3


class Tower(nn.Module):
    def __init__(self, n_in, width=64, n_out=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                 nn.Linear(width, n_out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = Tower(32)
        self.bottom = Tower(32)
        self.logit_scale = nn.Parameter(torch.tensor(float(np.log(1 / 0.07))))

    def forward(self, a, b):
        return self.top(a), self.bottom(b), self.logit_scale.exp()


def gather_features(feat):
    if dist.get_world_size() == 1:
        return feat
    return torch.cat(distF.all_gather(feat))


def clip_loss(a, b, scale):
    all_a, all_b = gather_features(a), gather_features(b)
    target = torch.arange(len(a)) + dist.get_rank() * len(a)
    return 0.5 * (F.cross_entropy(scale * a @ all_b.t(), target) + F.cross_entropy(scale * b @ all_a.t(), target))


@torch.no_grad()
def retrieval(model, a, b):
    model.eval()
    fa, fb, _ = model.module(a, b)
    hit = ((fa @ fb.t()).argmax(1) == torch.arange(len(a))).float().mean().item()
    model.train()
    return hit


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)

pix = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
train, held = pix[:1280], pix[1280:1480]
ds = TensorDataset(train[:, :32], train[:, 32:])
sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True, seed=9)
loader = DataLoader(ds, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)

model = DDP(TwoTower())
opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * len(loader))

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    seen, run = 0, torch.zeros(1)
    for a, b in loader:
        loss = clip_loss(*model(a, b))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, 4.6052)
        run += loss.detach()
        seen += 1
    dist.all_reduce(run)
    if rank == 0:
        print(f"[{epoch}] contrastive loss {run.item() / seen / world:.4f}  "
              f"R@1 {retrieval(model, held[:, :32], held[:, 32:]):.3f}", flush=True)

if rank == 0:
    os.makedirs("ckpt", exist_ok=True)
    torch.save(model.module.state_dict(), "ckpt/towers.pt")
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
