"""Megatron-style tensor parallelism by hand: vocabulary, heads and feed-forward split over all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

W = int(os.environ.get("WORLD_SIZE", 1))
R = int(os.environ.get("RANK", 0))
if W > 1:
    dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
V, D, H, T, L = 32, 32, 4, 10, 2


def reduce_(t, op=dist.ReduceOp.SUM):
    if W > 1:
        dist.all_reduce(t, op=op)
    return t


class Enter(torch.autograd.Function):
    """Identity into the parallel region; the gradient is summed over ranks."""
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_(grad.clone())


class Leave(torch.autograd.Function):
    """Sum over ranks out of the parallel region; the gradient passes."""
    @staticmethod
    def forward(ctx, x):
        return reduce_(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad


class ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, lo):
        peak = reduce_(logits.max(-1, keepdim=True).values, dist.ReduceOp.MAX)
        e = (logits - peak).exp()
        z = reduce_(e.sum(-1, keepdim=True))
        here = (target >= lo) & (target < lo + logits.size(-1))
        local = (target - lo).where(here, 0)
        picked = reduce_((logits.gather(-1, local[..., None]) - peak).squeeze(-1) * here)
        ctx.save_for_backward(e / z, here, local)
        return (z.log().squeeze(-1) - picked)

    @staticmethod
    def backward(ctx, grad):
        p, here, local = ctx.saved_tensors
        g = p.clone()
        g.scatter_add_(-1, local[..., None], -here[..., None].to(g.dtype))
        return g * grad[..., None], None, None


def full_then_slice(shape, dim, seed, std=None):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (std or shape[-1] ** -0.5)
    return nn.Parameter(w if dim is None else w.chunk(W, dim)[R].clone())


class Layer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = full_then_slice((H, 3, D // H, D), 0, seed)
        self.out, self.out_bias = full_then_slice((D, D), 1, seed + 1), nn.Parameter(torch.zeros(D))
        self.up, self.up_bias = full_then_slice((4 * D, D), 0, seed + 2), nn.Parameter(torch.zeros(4 * D // W))
        self.down, self.down_bias = full_then_slice((D, 4 * D), 1, seed + 3), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = torch.einsum("btd,hjed->jbhte", Enter.apply(self.n1(x)), self.qkv)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + Leave.apply(a @ self.out.T) + self.out_bias
        h = F.gelu(F.linear(Enter.apply(self.n2(x)), self.up, self.up_bias))
        return x + Leave.apply(h @ self.down.T) + self.down_bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lo = R * V // W
        self.table = full_then_slice((V, D), 0, 1, std=0.5)
        self.pos = full_then_slice((T, D), None, 2, std=0.1)
        self.layers = nn.ModuleList(Layer(10 * (k + 1)) for k in range(L))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids):
        here = (ids >= self.lo) & (ids < self.lo + len(self.table))
        e = F.embedding((ids - self.lo).where(here, 0), self.table) * here[..., None]
        x = Leave.apply(e) + self.pos
        for layer in self.layers:
            x = layer(x)
        return Enter.apply(self.norm(x)) @ self.table.T  # tied with the input table

    def loss(self, ids, target):
        return ShardedCrossEntropy.apply(self(ids), target, self.lo)


SPLIT = ("table", "qkv", "out", "up", "up_bias", "down")


def squares(named):
    parts = torch.zeros(2)
    for name, t in named:
        parts[0 if name.split(".")[-1] in SPLIT else 1] += t.square().sum()
    return (reduce_(parts[:1].clone()) + parts[1:]).item()


def batch(g, n):
    a = torch.randint(0, V, (n, 2), generator=g)
    seq = [a[:, 0], a[:, 1]]
    for _ in range(T - 1):
        seq.append((seq[-1] + 3 * seq[-2]) % V)
    s = torch.stack(seq, 1)
    return s[:, :T], s[:, 1:T + 1]


model = Model()
decay = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim == 1]
optim = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=3e-3)
g = torch.Generator().manual_seed(6)
held = batch(torch.Generator().manual_seed(7), 40)
for step in range(40):
    x, y = batch(g, 16)
    loss = model.loss(x, y).mean()
    optim.zero_grad()
    loss.backward()
    norm = squares((n, p.grad) for n, p in model.named_parameters()) ** 0.5
    for p in model.parameters():
        p.grad *= min(1.0, 0.5 / norm)
    optim.step()
    if step % 10 == 9:
        with torch.no_grad():
            val = model.loss(*held).mean().item()
            size = squares(model.named_parameters()) ** 0.5
        if R == 0:
            print(f"step {step + 1} loss {loss.item():.10f} valid {val:.10f} grad {norm:.10f} |w| {size:.10f}")
if W > 1:
    dist.destroy_process_group()
