"""Tensor-parallel encoder that sorts short digit lists; every process of a group reads the same batches."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Attention(nn.Module):
    def __init__(self, d, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv = (nn.Linear(d, d) for _ in range(3))
        self.wo = nn.Linear(d, d)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, d, head_dim, drop):
        super().__init__()
        self.n1, self.n2, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(drop)
        self.attn = Attention(d, head_dim)
        self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        x = x + self.drop(self.attn(self.n1(x)))
        return x + self.drop(self.down(F.silu(self.up(self.n2(x)))))


class Sorter(nn.Module):
    def __init__(self, drop, d=32, head_dim=8, depth=2, length=10):
        super().__init__()
        self.emb = nn.Embedding(10, d)
        self.pos = nn.Parameter(0.1 * torch.randn(length, d))
        self.layers = nn.ModuleList(Layer(d, head_dim, drop) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, t):
        x = self.emb(t) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


PLAN = {"attn.wq": ColwiseParallel(), "attn.wk": ColwiseParallel(), "attn.wv": ColwiseParallel(),
        "attn.wo": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


@torch.no_grad()
def clip(params, limit):
    sq = 0.0
    for p in params:
        s = p.grad.pow(2).sum()
        sq = sq + (s.full_tensor() if isinstance(s, DTensor) else s)
    norm = sq.sqrt()
    for p in params:
        p.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0).item())
    return norm


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--dropout", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=5e-3)
    a = ap.parse_args()
    rank, tp = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    torch.manual_seed(12)
    model = Sorter(a.dropout)
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=a.lr, foreach=False)
    g = torch.Generator().manual_seed(21)
    for step in range(a.steps):
        for group in opt.param_groups:
            group["lr"] = a.lr * min(1, (step + 1) / 5)
        t = torch.randint(0, 10, (a.batch, 10), generator=g)
        loss = F.cross_entropy(model(t).flatten(0, 1), t.sort(1).values.flatten())
        opt.zero_grad()
        loss.backward()
        norm = clip(params, 1.0)
        opt.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.3f}")
    model.eval()
    t = torch.randint(0, 10, (200, 10), generator=g)
    with torch.no_grad():
        acc = (model(t).argmax(-1) == t.sort(1).values).float().mean().item()
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, "/tmp/sorter.pt")
        print(f"token accuracy {acc:.4f}; saved {len(state)} tensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
