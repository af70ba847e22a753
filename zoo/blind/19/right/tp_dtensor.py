"""Tensor-parallel GPT with DTensor: every rank sees the whole batch, attention heads and MLP are split."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, DIM, HEADS, LAYERS, CONTEXT = 24, 32, 4, 2, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, DIM // HEADS).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(DIM), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(DIM), MLP()

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, DIM), nn.Parameter(0.02 * torch.randn(CONTEXT, DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.pos[:ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def shard(model, mesh):
    plan = {}
    for k in range(LAYERS):
        for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"):
            plan[f"layers.{k}.{name}"] = ColwiseParallel()
        for name in ("attn.o", "mlp.down"):
            plan[f"layers.{k}.{name}"] = RowwiseParallel()
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def clip(params, limit):
    norm = torch.stack([whole(p.grad).norm() for p in params]).norm()
    for p in params:
        p.grad.mul_(min(1.0, limit / (norm.item() + 1e-6)))
    return norm


def sample(n, generator):
    """Arithmetic progressions modulo VOCAB with random start and stride, and a few corrupted tokens."""
    start = torch.randint(0, VOCAB, (n, 1), generator=generator)
    stride = torch.randint(1, 6, (n, 1), generator=generator)
    seq = (start + stride * torch.arange(CONTEXT + 1)) % VOCAB
    noise = torch.rand(seq.shape, generator=generator) < 0.03
    return torch.where(noise, torch.randint(0, VOCAB, seq.shape, generator=generator), seq)


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    torch.manual_seed(21)
    model = shard(GPT(), mesh)
    params = list(model.parameters())
    split = [p for p in params if isinstance(p, DTensor)]
    copied = [p for p in params if not isinstance(p, DTensor)]
    optim = torch.optim.AdamW([{"params": split}, {"params": copied}], lr=4e-3, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=4e-3, total_steps=20)

    stream = torch.Generator().manual_seed(4)
    valid = sample(64, torch.Generator().manual_seed(5))
    for step in range(20):
        batch = sample(24, stream)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optim.zero_grad()
        loss.backward()
        norm = clip(params, 1.0)
        optim.step()
        sched.step()
        if step % 10 == 9:
            with torch.no_grad():
                logits = model(valid[:, :-1])
                val = F.cross_entropy(logits.flatten(0, 1), valid[:, 1:].flatten())
                acc = (logits.argmax(-1) == valid[:, 1:]).double().mean()
            size = sum(whole(p.detach()).abs().sum() for p in params)
            if dist.get_rank() == 0:
                print(f"step {step + 1} train {loss.item():.10f} valid {val.item():.10f} acc {acc.item():.6f} "
                      f"grad {norm.item():.10f} |w| {size.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
