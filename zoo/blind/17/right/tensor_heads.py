import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, DIM, HEADS, LAYERS, SEQ, BATCH = 28, 32, 4, 2, 14, 24


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.wo = nn.Linear(DIM, DIM)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, DIM // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.w1, self.w2, self.w3 = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM), nn.Linear(DIM, 3 * DIM)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelise(model, mesh):
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel(), "attention.wo": RowwiseParallel()}
    plan.update({f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")})
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    })


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def clip(parameters, limit):
    norm = torch.stack([whole(p.grad).norm() for p in parameters]).norm()
    scale = min(1.0, limit / (norm.item() + 1e-6))
    for p in parameters:
        p.grad.mul_(scale)
    return norm.item()


def copies(seed, n):
    g = torch.Generator().manual_seed(seed)
    half = torch.randint(1, VOCAB, (n, SEQ // 2), generator=g)
    return torch.cat([half, half.flip(1), torch.zeros(n, 1, dtype=torch.long)], dim=1)


def loss_of(model, ids, keep):
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return (loss * keep).sum() / (keep.sum() * len(ids)), logits


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(12)
    model = Decoder()
    parallelise(model, mesh)
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}],
                                  lr=4e-3, weight_decay=0.05, foreach=False)
    train, valid = copies(1, 192), copies(2, 60)
    keep = (torch.arange(SEQ) >= SEQ // 2 - 1).to(torch.get_default_dtype())
    for epoch in range(2):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(50 + epoch))
        losses, norms = [], []
        for rows in order.split(BATCH):
            loss, _ = loss_of(model, train[rows], keep)
            optimizer.zero_grad()
            loss.backward()
            norms.append(clip(parameters, 1.0))
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            loss, logits = loss_of(model, valid, keep)
            accuracy = ((logits.argmax(-1) == valid[:, 1:]) * keep).sum() / (keep.sum() * len(valid))
        if rank == 0:
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.5f} norm {sum(norms) / len(norms):.5f} "
                  f"valid {loss.item():.5f} accuracy {accuracy.item():.4f}")
    total = sum(whole(p.detach()).double().square().sum() for p in parameters)
    if rank == 0:
        print(f"weights {total.sqrt().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
