"""Patch transformer on digits with fully_shard, activation checkpointing, clipping, and a full state dict at the end."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.heads = heads

    def _inner(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(a)
        return x + self.mlp(self.n2(x))

    def forward(self, x):
        return checkpoint(self._inner, x, use_reentrant=False) if self.training else self._inner(x)


class TinyViT(nn.Module):
    def __init__(self, d=33, heads=3, depth=2):
        super().__init__()
        self.patch = nn.Linear(4, d)
        self.pos = nn.Parameter(torch.zeros(16, d))
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(16 * d, 10)

    def forward(self, img):
        p = img.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(img), 16, 4)
        h = self.patch(p) + self.pos
        for blk in self.blocks:
            h = blk(h)
        return self.head(self.norm(h).flatten(1))


def batches(n, per_rank, epoch, rank, world):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(100 + epoch))
    step = per_rank * world
    for i in range(0, n - step + 1, step):
        yield order[i + rank * per_rank:i + (rank + 1) * per_rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--max-norm", type=float, default=0.5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32) / 16, torch.tensor(d.target)
    xt, yt, xv, yv = x[:768], y[:768], x[768:], y[768:]

    torch.manual_seed(7)
    model = TinyViT()
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)

    for epoch in range(args.epochs):
        model.train()
        seen = torch.zeros(2)
        for idx in batches(len(xt), args.bs, epoch, rank, world):
            loss = F.cross_entropy(model(xt[idx]), yt[idx])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            opt.step()
            opt.zero_grad()
            seen += torch.tensor([loss.item() * len(idx), len(idx)])
        dist.all_reduce(seen)
        model.eval()
        with torch.no_grad():  # every rank takes part: parameters are gathered in forward
            mine = torch.arange(rank, len(xv), world)
            hits = (model(xv[mine]).argmax(1) == yv[mine]).sum()
        dist.all_reduce(hits)
        norm = norm.full_tensor()
        if rank == 0:
            print(f"epoch {epoch}: loss {seen[0] / seen[1]:.4f}, grad norm {norm.item():.3f}, val acc {hits.item() / len(xv):.4f}", flush=True)

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        pathlib.Path("runs").mkdir(exist_ok=True)
        torch.save(state, "runs/vit.pt")
        print("saved", sum(v.numel() for v in state.values()), "numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
