"""Digits transformer under fully_shard (hybrid mesh when there are four processes), two micro-batches per step."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MICRO = 2
BATCH = 64
STEPS = 16


class Mixer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.ch = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 24)
        self.blocks = nn.ModuleList(Mixer(8, 24) for _ in range(3))
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x.mean(1))


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29702").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(9)
    model = Net()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32) / 16, torch.tensor(d.target)
    gen = torch.Generator().manual_seed(4)
    for step in range(STEPS):
        ids = torch.randint(1500, (BATCH,), generator=gen).view(MICRO, world, -1)[:, rank]
        shown = torch.zeros(())
        for k in range(MICRO):
            model.set_requires_gradient_sync(k == MICRO - 1)
            loss = nn.functional.cross_entropy(model(x[ids[k]]), y[ids[k]]) / MICRO
            loss.backward()
            shown += loss.detach() / world
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(shown)
        norm = norm.full_tensor()
        if rank == 0 and step % 4 == 3:
            print(f"{step + 1:3d} loss {shown.item():.5f} grad norm {norm.item():.5f}")
    with torch.no_grad():
        acc = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if rank == 0:
        print(f"held out {acc.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
