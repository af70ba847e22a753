"""Tensor-parallel causal model on source text; the device mesh has one dimension, 'tp'."""
import argparse
import textwrap
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Mixer(nn.Module):
    """Attention with separate projections; the head count follows from the width of the local projection."""

    def __init__(self, dim, head):
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = Mixer(dim, 8)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = x + self.mix(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self, dim=32, depth=2, length=40):
        super().__init__()
        self.tok, self.pos = nn.Embedding(128, dim), nn.Parameter(torch.randn(length, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = {"mix.q": ColwiseParallel(), "mix.k": ColwiseParallel(), "mix.v": ColwiseParallel(), "mix.o": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel()}


def clip(params, limit, mesh):
    """Norm over all numbers of the model: shares are added up, whole tensors count once."""
    local = torch.zeros(())
    whole = torch.zeros(())
    for p in params:
        if isinstance(p.grad, DTensor) and p.grad.placements != (Replicate(),):
            local += p.grad.to_local().square().sum()
        else:
            whole += (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).square().sum()
    dist.all_reduce(local, group=mesh.get_group())
    scale = (limit / ((local + whole).sqrt() + 1e-6)).clamp(max=1.0)
    for p in params:
        (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(scale)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    text = torch.tensor(list(open(textwrap.__file__, "rb").read())) & 127

    torch.manual_seed(17)
    model = Model()
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    params = list(model.parameters())
    opt = torch.optim.AdamW([{"params": [p for p in params if isinstance(p, DTensor)]},
                             {"params": [p for p in params if not isinstance(p, DTensor)], "weight_decay": 0.0}],
                            lr=args.lr, foreach=False)
    picks = torch.Generator().manual_seed(2)
    for step in range(args.steps):
        at = torch.randint(0, len(text) - 41, (args.batch, 1), generator=picks) + torch.arange(41)
        ids = text[at]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        clip(params, 1.0, mesh)
        opt.step()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
