"""Denoising autoencoder of digits; built on the meta device, sharded, then materialised."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def parse():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=45)
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--code", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=29)
    return p.parse_args()


class AutoEncoder(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 80), nn.ELU(), nn.Linear(80, 40), nn.ELU(), nn.Linear(40, code))
        self.dec = nn.Sequential(nn.Linear(code, 40), nn.ELU(), nn.Linear(40, 80), nn.ELU(), nn.Linear(80, 64))

    def forward(self, x):
        return torch.sigmoid(self.dec(self.enc(x)))


@torch.no_grad()
def materialise(model, seed):
    """Storage first, then values: scaled normal for matrices, zero for vectors."""
    model.to_empty(device="cpu")
    gen = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        local = p.to_local()
        if p.ndim == 1:
            local.zero_()
            continue
        std = (2.0 / (p.shape[0] + p.shape[1])) ** 0.5
        local.normal_(0.0, std, generator=gen)


def batches(data, steps, size, seed):
    gen = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(0, len(data), (size,), generator=gen)
        clean = data[rows]
        yield clean + 0.2 * torch.randn(clean.shape, generator=gen), clean


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))

    with torch.device("meta"):
        model = AutoEncoder(args.code)
    fully_shard(model.enc, mesh=mesh)
    fully_shard(model.dec, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialise(model, args.seed)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    for step, (noisy, clean) in enumerate(batches(data[:1600], args.steps, args.batch, args.seed + 1)):
        noisy, clean = noisy.chunk(world)[rank], clean.chunk(world)[rank]
        loss = (model(noisy) - clean).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 15 == 0 and rank == 0:
            print(f"[{step}] loss {loss.item():.5f}")

    with torch.no_grad():
        held = (model(data[1600:]) - data[1600:]).square().mean()
    if rank == 0:
        print(f"held-out reconstruction {held.item():.5f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
