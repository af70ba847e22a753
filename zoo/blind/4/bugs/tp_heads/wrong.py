"""Character transformer, attention heads and hidden units divided among the processes (DTensor)."""
import argparse
import inspect
import queue
import sched
import time

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class HeadNorm(nn.Module):
    """RMS normalisation inside each head; one gain per channel, shared by all heads."""

    def __init__(self, head_dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(head_dim))

    def spread(self, mesh):
        self.gain = nn.Parameter(dt.distribute_tensor(self.gain.detach(), mesh, [dt.Replicate()]))

    def forward(self, x):
        gain = self.gain.to_local()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


class Layer(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.pre, self.post = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.wo = nn.Linear(dim, dim, bias=False)
        self.qn, self.kn = HeadNorm(head_dim), HeadNorm(head_dim)
        self.w1, self.w2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.pre(x)
        q, k, v = (w(h).view(b, t, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = self.qn(q), self.kn(k)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.wo(a.transpose(1, 2).reshape(b, t, -1))
        return x + self.w2(F.gelu(self.w1(self.post(x))))


PLAN = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(), "wo": RowwiseParallel(),
        "w1": ColwiseParallel(), "w2": RowwiseParallel()}


class Transformer(nn.Module):
    def __init__(self, dim=32, head_dim=8, depth=2, length=32):
        super().__init__()
        self.tok = nn.Embedding(128, dim)
        self.pos = nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, head_dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 128)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))

    def spread(self, mesh):
        for layer in self.layers:
            parallelize_module(layer, mesh, PLAN)
            layer.qn.spread(mesh)
            layer.kn.spread(mesh)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=31)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(args.seed)
    model = Transformer(length=args.length)
    model.spread(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, foreach=False)

    text = torch.tensor([min(ord(c), 127) for m in (queue, sched) for c in inspect.getsource(m)])
    gen = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        at = torch.randint(0, len(text) - args.length - 1, (args.batch,), generator=gen)
        seq = torch.stack([text[i:i + args.length + 1] for i in at.tolist()])
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
