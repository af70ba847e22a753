"""A mixture regression with accumulation and a cosine schedule over optimizer steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, ACCUMULATE = 3, 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 384).unsqueeze(1)
    dataset = TensorDataset(x, torch.sin(2 * x) + 0.3 * x)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * len(loader) // ACCUMULATE
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for i, (bx, by) in enumerate(loader, start=1):
            loss = F.mse_loss(model(bx), by) / ACCUMULATE
            loss.backward()
            if i % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
