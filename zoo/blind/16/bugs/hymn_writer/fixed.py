"""A character model of hymn verses; long verses are cut along the sequence, one piece per process."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
IGNORE, LENGTH, WIDTH, HEADS = -100, 64, 32, 4
VERSE = (
    "morning light upon the water, sing the river, sing the stone. "
    "evening bells above the harbour, call the weary sailor home. "
    "winter stars are slow and silent, snow is falling on the loam. "
    "summer fields are gold and golden, never shall we walk alone. "
)
LETTERS = sorted(set(VERSE))


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.size = x.size(2)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.narrow(2, dist.get_rank() * ctx.size, ctx.size)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        k, v = GatherSequence.apply(k.contiguous()), GatherSequence.apply(v.contiguous())
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class HymnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, tokens, start):
        place = start + torch.arange(tokens.size(1))
        mask = place[:, None] >= torch.arange(LENGTH)[None]
        x = self.letters(tokens) + self.places(place)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def cut(tokens, rank, world):
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    inputs = tokens.chunk(world, 1)[rank]
    return inputs, labels.chunk(world, 1)[rank]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40)
    model = HymnModel()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([LETTERS.index(c) for c in VERSE * 3])
    g = torch.Generator().manual_seed(6)
    for step in range(40):
        starts = torch.randint(0, len(text) - LENGTH, (12,), generator=g)
        tokens = text[starts[:, None] + torch.arange(LENGTH)]
        inputs, labels = cut(tokens, rank, world)
        logits = model(inputs, rank * inputs.size(1))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        totals = torch.stack([loss.detach(), (labels != IGNORE).sum().double()])
        dist.all_reduce(totals)
        opt.zero_grad()
        (loss / totals[1]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {totals[0] / totals[1]:.8f}")
    if rank == 0:
        size = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
        print(f"weights {size:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
