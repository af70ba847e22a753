"""Autoencoder for digit images, built on the meta device and materialised after sharding."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

GLOBAL_BATCH, STEPS = 96, 30


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.norm = nn.LayerNorm(48)
        self.fc2 = nn.Linear(48, 12)

    def forward(self, x):
        return self.fc2(F.elu(self.norm(self.fc1(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(12, 48)
        self.norm = nn.LayerNorm(48)
        self.fc2 = nn.Linear(48, 64)

    def forward(self, z):
        return torch.sigmoid(self.fc2(F.elu(self.norm(self.fc1(z)))))


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, x):
        return self.decoder(self.encoder(x))


@torch.no_grad()
def materialize(model, seed):
    model.to_empty(device="cpu")
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        local = p.to_local()
        if p.ndim == 2:
            std = (2.0 / (p.shape[0] + p.shape[1])) ** 0.5
            full = torch.empty(p.shape).normal_(0.0, std, generator=gen)
            local.copy_(distribute_tensor(full, p.device_mesh, p.placements).to_local())
        elif name.endswith("norm.weight"):
            local.fill_(1.0)
        else:
            local.zero_()


def load():
    x = torch.tensor(load_digits().data) / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    return x[order[:1600]], x[order[1600:1600 + 192]]


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    with torch.device("meta"):
        model = AutoEncoder()
    fully_shard(model.encoder, mesh=mesh)
    fully_shard(model.decoder, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, seed=19)

    train, test = load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=STEPS)
    for step in range(STEPS):
        gen = torch.Generator().manual_seed(step)
        rows = torch.randperm(len(train), generator=gen)[:GLOBAL_BATCH][rank::world]
        clean = train[rows]
        loss = F.mse_loss(model(clean), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

        if step % 15 == 14:
            part = test[rank::world]
            with torch.no_grad():
                error = F.mse_loss(model(part), part, reduction="sum")
            dist.all_reduce(error)
            if rank == 0:
                print(f"step {step + 1} test error {error.item() / test.numel():.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
