"""Adversarial training with one gradient-sign step on the inputs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def attack(net, x, y, eps=0.1):
    x = x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(F.cross_entropy(net(x), y, reduction="sum"), x)
    return (x + eps * grad.sign()).detach()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(3)
    y = torch.randint(0, 3, (72,), generator=gen)
    x = torch.randn(72, 1, 6, 6, generator=gen) + y.view(-1, 1, 1, 1) * 0.5
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, 12 // dist.get_world_size(), sampler=sampler, num_workers=1)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.LayerNorm(16),
            nn.SiLU(),
            nn.Linear(16, 3),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=3 * len(loader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            perturbed = attack(model.module, images, labels)
            loss = 0.5 * F.cross_entropy(model(perturbed), labels) + 0.5 * F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
