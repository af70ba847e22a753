"""Digits read row by row by a small transformer; hybrid sharding: replicas between groups, shards within a group."""
import time
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w)
        x = x + self.proj(mixed)
        return x + self.mlp(self.n2(x))


class RowReader(nn.Module):
    def __init__(self, width=32, heads=4, depth=2):
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.rows(images) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def shard_model(net, replicas):
    world = dist.get_world_size()
    replicas = min(replicas, world)
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    for block in net.blocks:
        fully_shard(block, mesh=mesh["shard"], reshard_after_forward=True)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    return net


def accuracy(net, images, labels):
    with torch.no_grad():
        return (net(images).argmax(1) == labels).float().mean().item()


def main():
    ap = ArgumentParser()
    ap.add_argument("--replicas", type=int, default=2)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    train, held = slice(0, 1408), slice(1408, None)

    torch.manual_seed(21)
    net = shard_model(RowReader(), a.replicas)
    opt = torch.optim.AdamW(net.parameters(), lr=a.lr, weight_decay=0.05)
    steps = 1408 // a.batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs * steps)
    for epoch in range(a.epochs):
        order = torch.randperm(1408, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(a.batch):
            mine = batch.tensor_split(world)[rank]
            loss = F.cross_entropy(net(images[train][mine]), labels[train][mine])
            loss.backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
        acc = accuracy(net, images[held], labels[held])
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, held-out accuracy {acc:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
