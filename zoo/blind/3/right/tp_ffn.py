"""Tensor parallel classifier: the feed-forward and attention projections are split over ranks with DTensor."""
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


class Attn(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, _ = x.shape
        split = lambda z: z.view(b, t, -1, self.head_dim).transpose(1, 2)
        a = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))
        return self.o(a.transpose(1, 2).reshape(b, t, -1))


class FFN(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attn(dim, 8)
        self.ffn = FFN(dim, 4 * dim)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.ffn(self.n2(x))


class RowTransformer(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(8, dim)
        self.pos = nn.Parameter(torch.randn(8, dim) * 0.02)
        self.layers = nn.Sequential(*[Layer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        return self.head(self.layers(self.inp(x) + self.pos).mean(1))


PLAN = {
    "attn.q": ColwiseParallel(), "attn.k": ColwiseParallel(), "attn.v": ColwiseParallel(), "attn.o": RowwiseParallel(),
    "ffn.up": ColwiseParallel(), "ffn.down": RowwiseParallel(),
}


def clip_(params, limit):
    total = torch.zeros(())
    for p in params:
        sq = p.grad.pow(2).sum()
        total += sq.full_tensor() if isinstance(sq, DTensor) else sq
    norm = total.sqrt()
    coef = min(1.0, limit / (norm.item() + 1e-6))
    for p in params:
        p.grad.mul_(coef)
    return norm.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=56)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    # one tensor-parallel group, no data parallelism: all ranks read the same batches
    torch.manual_seed(0)
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    model = RowTransformer()
    for layer in model.layers:
        parallelize_module(layer, tp, PLAN)
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.01, foreach=False)
    n_train = 1456
    gen = torch.Generator().manual_seed(2024)
    for epoch in range(args.epochs):
        for idx in torch.randperm(n_train, generator=gen).split(args.batch_size):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            norm = clip_(params, 2.0)
            opt.step()
        with torch.no_grad():
            acc = (model(x[n_train:]).argmax(1) == y[n_train:]).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} |g| {norm:.3f} test acc {acc:.4f}")

    state = {k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, "/tmp/tp_ffn.pt")
        print("saved", sum(v.numel() for v in state.values()), "weights")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
