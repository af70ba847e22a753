"""Next token prediction on periodic sequences; every sequence is spread over the ranks (context parallel)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, DIM, HEADS, LAYERS = 20, 64, 32, 4, 2
BATCH, STEPS = 12, 30


class GatherSequence(torch.autograd.Function):
    """[B, H, t, K] on every rank -> [B, H, T, K] on all of them."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, where):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        k = GatherSequence.apply(k.contiguous())
        v = GatherSequence.apply(v.contiguous())
        mask = where.unsqueeze(1) >= torch.arange(k.shape[2]).unsqueeze(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(LENGTH, DIM)
        self.attn = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, DIM)) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, where):
        x = self.tok(ids) + self.pos(where)
        for i in range(LAYERS):
            x = x + self.attn[i](self.norms[2 * i](x), where)
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def sequences(seed):
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(BATCH):
        period = int(torch.randint(3, 9, (1,), generator=gen))
        motif = torch.randint(VOCAB, (period,), generator=gen)
        rows.append(motif.repeat(LENGTH // period + 1)[:LENGTH])
    return torch.stack(rows)


def local_part(tokens, rank, world):
    tokens = tokens.chunk(world, dim=1)[rank]
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    where = torch.arange(LENGTH).chunk(world)[rank]
    return tokens, labels, where


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def total_loss(seed):
        tokens, labels, where = local_part(sequences(seed), rank, world)
        logits = model(tokens, where)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        count = (labels != -100).sum()
        dist.all_reduce(count)
        return loss / count

    for step in range(STEPS):
        loss = total_loss(step)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()

    with torch.no_grad():
        held_out = total_loss(10_000)
    dist.all_reduce(held_out)
    if rank == 0:
        print(f"held-out loss {held_out.item():.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
