"""Small patch transformer for handwritten digits, sharded within a node and replicated across nodes."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class PatchNet(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.pos = nn.Parameter(torch.randn(16, dim) * 0.5)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images):
        p = images.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = self.embed(p) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def shard_model(net, mesh):
    for block in net.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh)
    return net


@torch.no_grad()
def accuracy(net, x, y):
    net.eval()
    hits = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return hits


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = max(1, world // args.per_node)
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(args.seed)
    net = shard_model(PatchNet(), mesh)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    train_x, train_y, test_x, test_y = x[:1500], y[:1500], x[1500:], y[1500:]
    picker = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        rows = torch.randperm(1500, generator=picker)[: args.batch].chunk(world)[rank]
        loss = F.cross_entropy(net(train_x[rows]), train_y[rows])
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    acc = accuracy(net, test_x, test_y)
    if rank == 0:
        print(f"accuracy {acc:.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--per-node", type=int, default=1)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=3)
    main(ap.parse_args())
