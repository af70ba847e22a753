"""One transformer block: the MLP is split over columns and rows, norms run on a slice of the sequence."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29561")
DIM, HIDDEN, SEQ, VOCAB = 32, 96, 24, 28


class GatherSeq(torch.autograd.Function):
    """[B, S/W, D] -> [B, S, D]; backward: reduce-scatter."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(WORLD, 1)[RANK].contiguous()


class ScatterSeq(torch.autograd.Function):
    """partial sums [B, S, D] -> reduced slice [B, S/W, D]; backward: gather."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(WORLD, 1)[RANK].contiguous()

    @staticmethod
    def backward(ctx, g):
        parts = [torch.empty_like(g) for _ in range(WORLD)]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(SEQ, DIM) * 0.1)
        self.norm = nn.LayerNorm(DIM)
        up, down = torch.randn(HIDDEN, DIM) / DIM ** 0.5, torch.randn(DIM, HIDDEN) / HIDDEN ** 0.5
        self.up = nn.Parameter(up.chunk(WORLD, 0)[RANK].clone())
        self.down = nn.Parameter(down.chunk(WORLD, 1)[RANK].clone())
        self.final_norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        part = slice(RANK * SEQ // WORLD, (RANK + 1) * SEQ // WORLD)
        h = self.emb(ids[:, part]) + self.pos[part]
        full = GatherSeq.apply(self.norm(h))
        mixed = full.cumsum(1) / torch.arange(1, SEQ + 1).view(1, -1, 1)
        h = h + ScatterSeq.apply(F.gelu(mixed @ self.up.T) @ self.down.T)
        return self.head(self.final_norm(h)), part


def sequences(n):
    import string
    import this
    text = "".join(this.d.get(c, c) for c in this.s).lower()
    table = {c: i + 1 for i, c in enumerate(string.ascii_lowercase)}
    ids = torch.tensor([table.get(c, 0) for c in text])
    return torch.stack([ids[i:i + SEQ + 1] for i in range(0, len(ids) - SEQ - 1, 3)][:n])


def main():
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    torch.manual_seed(4)
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    data = sequences(256)
    order = torch.Generator().manual_seed(8)
    shared = [p for n, p in model.named_parameters() if n not in ("up", "down")]
    for step in range(40):
        rows = data[torch.randint(len(data), (16,), generator=order)]
        logits, part = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:][:, part].flatten(), reduction="sum") / (16 * SEQ)
        opt.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
        opt.step()
        if step % 8 == 7:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if RANK == 0:
                print(f"step {step + 1}: {shown.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
