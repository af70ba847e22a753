"""Character model with the sequence cut over the processes; attention exchanges positions for heads (all-to-all)."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer

LENGTH, WIDTH, HEADS, BATCH, STEPS = 64, 32, 4, 16, 36


class Exchange(torch.autograd.Function):
    """Splits dimension `cut` over the processes and joins dimension `join`."""

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.dims = cut, join
        return exchange(x, cut, join)

    @staticmethod
    def backward(ctx, grad):
        cut, join = ctx.dims
        return exchange(grad, join, cut), None, None


def exchange(x, cut, join):
    world = dist.get_world_size()
    send = torch.stack(x.chunk(world, cut)).contiguous()
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    return torch.cat(receive.unbind(0), join)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = Exchange.apply(qkv, 2, 3).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = Exchange.apply(y, 2, 1)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.attention, self.ln2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab)

    def forward(self, ids, positions):
        return self.head(self.norm(self.blocks(self.token(ids) + self.place(positions))))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    text = load_breast_cancer().DESCR
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    torch.manual_seed(4)
    model = Model(len(letters))
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3, eps=1e-6)
    draw = torch.Generator().manual_seed(21)
    place = torch.arange(LENGTH).chunk(world)[rank]
    for step in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH, 1), generator=draw)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=draw)
        x, y = ids[starts + place], ids[starts + place + 1]
        y = y.masked_fill(place >= lengths, -100)
        loss = F.cross_entropy(model(x, place).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / lengths.sum()
        optimizer.zero_grad()
        loss.backward()
        flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])
        optimizer.step()
        if step % 5 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
