"""Warm-up and cosine decay per optimizer step, parameter groups with and without decay."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, WARMUP = 3, 5


def parameter_groups(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.rand(256, 2) * 6 - 3
    dataset = TensorDataset(x, torch.sin(x[:, :1]) * torch.cos(x[:, 1:]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=5e-3)
    steps = EPOCHS * len(loader)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - WARMUP)
    scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[WARMUP])
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = F.mse_loss(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
