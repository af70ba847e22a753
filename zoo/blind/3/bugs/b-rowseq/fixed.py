"""Row-sequence digit classifier, attention and MLP split over the ranks of one mesh."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.hd = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(self.hd)
        self.k_norm = nn.RMSNorm(self.hd)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.wq(x).view(b, t, -1, self.hd)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(b, t, -1, self.hd)).transpose(1, 2)
        v = self.wv(x).view(b, t, -1, self.hd).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.ln2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class RowNet(nn.Module):
    def __init__(self, dim=32, heads=4, depth=2):
        super().__init__()
        self.inp = nn.Linear(8, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 8, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.inp(x) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.ln(x).mean(1))


def split_model(model, mesh):
    plan = {
        "attn.wq": ColwiseParallel(), "attn.wk": ColwiseParallel(), "attn.wv": ColwiseParallel(),
        "attn.wo": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel(),
    }
    for blk in model.blocks:
        parallelize_module(blk, mesh, plan)
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.08)
    ap.add_argument("--save", default="rowseq.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(11)

    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32) / 8.0 - 1.0
    y = torch.tensor(d.target)
    xtr, ytr, xte, yte = x[:960], y[:960], x[960:1360], y[960:1360]

    model = split_model(RowNet(), mesh)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, foreach=False)
    order = torch.Generator().manual_seed(5)

    for epoch in range(args.epochs):
        total = 0.0
        perm = torch.randperm(len(xtr), generator=order)
        for ids in perm.split(args.batch):
            loss = F.cross_entropy(model(xtr[ids]), ytr[ids])
            opt.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                if "q_norm" in name or "k_norm" in name:
                    dist.all_reduce(p.grad, group=mesh.get_group("tp"))
            opt.step()
            total += loss.item() * len(ids)
        model.eval()
        with torch.no_grad():
            acc = (model(xte).argmax(1) == yte).float().mean().item()
        model.train()
        if rank == 0:
            print(f"epoch {epoch}  loss {total / len(xtr):.4f}  acc {acc:.4f}", flush=True)

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v.detach()
            for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(full, args.save)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
