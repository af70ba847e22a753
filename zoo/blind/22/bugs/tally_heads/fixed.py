"""Most frequent symbol of a sequence; attention heads and MLP columns are split over the processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

SYMBOLS, LENGTH = 10, 15
DIM, HEADS, DEPTH = 32, 4, 2
BATCH, STEPS = 48, 15


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard(weight, dim):
    return nn.Parameter(weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        full = [nn.Linear(DIM, DIM, bias=False) for _ in range(4)]
        self.wq, self.wk, self.wv = (shard(layer.weight, 0) for layer in full[:3])
        self.wo = shard(full[3].weight, 1)
        self.q_norm = nn.RMSNorm(DIM // HEADS, eps=1e-6)
        self.k_norm = nn.RMSNorm(DIM // HEADS, eps=1e-6)

    def forward(self, x):
        b, t, _ = x.shape
        x = Enter.apply(x)
        q, k, v = (F.linear(x, w).view(b, t, -1, DIM // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return Leave.apply(F.linear(y.transpose(1, 2).reshape(b, t, -1), self.wo))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.w1, self.b1 = shard(up.weight, 0), shard(up.bias, 0)
        self.w2, self.b2 = shard(down.weight, 1), nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        h = F.gelu(F.linear(Enter.apply(x), self.w1, self.b1))
        return Leave.apply(F.linear(h, self.w2)) + self.b2


class Tally(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * DEPTH))
        self.attention = nn.ModuleList(Attention() for _ in range(DEPTH))
        self.mlp = nn.ModuleList(FeedForward() for _ in range(DEPTH))
        self.head = nn.Linear(DIM, SYMBOLS)

    def forward(self, x):
        h = self.embed(x)
        for i in range(DEPTH):
            h = h + self.attention[i](self.norms[2 * i](h))
            h = h + self.mlp[i](self.norms[2 * i + 1](h))
        return self.head(h.mean(1))


def reduce_head_norms(model):
    for layer in model.attention:
        for norm in (layer.q_norm, layer.k_norm):
            dist.all_reduce(norm.weight.grad)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()

    torch.manual_seed(15)
    model = Tally()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    data = torch.Generator().manual_seed(16)
    for step in range(STEPS):
        x = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=data)
        y = F.one_hot(x, SYMBOLS).sum(1).argmax(1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        reduce_head_norms(model)
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3d} loss {loss.item():.8f}")
    if rank == 0:
        scale = torch.stack([layer.q_norm.weight.mean() for layer in model.attention])
        print("query norm scale", [round(v, 6) for v in scale.tolist()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
