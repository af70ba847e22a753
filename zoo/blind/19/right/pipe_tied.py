"""GPipe by hand with embedding and output weights tied across the first and the last stage."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, T, BLOCKS = 18, 24, 12, 4
BATCH, MICRO, STEPS = 32, 4, 30


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(T, T)
        self.ff = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("causal", torch.tril(torch.ones(T, T)))

    def forward(self, x):
        weight = self.mix.weight * self.causal
        x = x + F.linear(self.norm(x).transpose(1, 2), weight, self.mix.bias).transpose(1, 2)
        return x + self.ff(x)


class Stage(nn.Module):
    """A run of blocks; first and last stage hold their own copy of the shared table."""

    def __init__(self, rank, world):
        super().__init__()
        torch.manual_seed(8)  # the whole model is drawn everywhere, then cut
        table = nn.Embedding(VOCAB, DIM)
        blocks = [Block() for _ in range(BLOCKS)]
        norm = nn.LayerNorm(DIM)
        per = BLOCKS // world
        self.first, self.last = rank == 0, rank == world - 1
        self.blocks = nn.ModuleList(blocks[rank * per:(rank + 1) * per])
        if self.first or self.last:
            self.table = table
        if self.last:
            self.norm = norm

    def forward(self, x):
        if self.first:
            x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.table.weight.T if self.last else x


class Pipeline:
    def __init__(self, stage, rank, world):
        self.stage, self.rank, self.world = stage, rank, world
        self.ends = dist.new_group([0, world - 1]) if world > 1 else None

    def forward_one(self, ids):
        if self.stage.first:
            inp = ids
        else:
            inp = torch.empty(len(ids), T, DIM)
            dist.recv(inp, src=self.rank - 1)
            inp.requires_grad_(torch.is_grad_enabled())
        out = self.stage(inp)
        if not self.stage.last:
            dist.send(out.detach(), dst=self.rank + 1)
        return inp, out

    def train_step(self, ids, target, weight):
        """Loss = weighted token loss of the whole batch over the sum of all weights."""
        norm, total, kept = weight.sum(), torch.zeros(()), []
        pieces = list(zip(ids.chunk(MICRO), target.chunk(MICRO), weight.chunk(MICRO)))
        for i, t, w in pieces:
            inp, out = self.forward_one(i)
            if self.stage.last:
                out = (F.cross_entropy(out.transpose(1, 2), t, reduction="none") * w).sum() / norm
                total += out.detach()
            kept.append((inp, out))
        for inp, out in reversed(kept):
            if self.stage.last:
                out.backward()
            else:
                grad = torch.empty_like(out)
                dist.recv(grad, src=self.rank + 1)
                out.backward(grad)
            if not self.stage.first:
                dist.send(inp.grad, dst=self.rank - 1)
        if self.world > 1 and (self.stage.first or self.stage.last):
            dist.all_reduce(self.stage.table.weight.grad, group=self.ends)
        return total

    def square_sum(self, tensors):
        skip = self.stage.last and not self.stage.first  # the table counts once
        s = sum(t.detach().square().sum() for n, t in tensors if not (skip and n.startswith("table")))
        if self.world > 1:
            dist.all_reduce(s)
        return s

    def from_last(self, value):
        if self.world > 1:
            dist.broadcast(value, src=self.world - 1)
        return value

    @torch.no_grad()
    def evaluate(self, ids, target):
        _, out = self.forward_one(ids)
        res = torch.zeros(2)
        if self.stage.last:
            res[0] = F.cross_entropy(out.transpose(1, 2), target)
            res[1] = (out.argmax(-1) == target).double().mean()
        return self.from_last(res)


def make(n, g):
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    step = torch.randint(1, 5, (n, 1), generator=g)
    seq = (start + step * torch.arange(T + 1)) % VOCAB
    first = torch.randint(0, 4, (n, 1), generator=g)
    return seq[:, :-1], seq[:, 1:], (torch.arange(T) >= first).double()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    stage = Stage(rank, world)
    pipe = Pipeline(stage, rank, world)
    optim = torch.optim.Adam(stage.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(12)
    vx, vy, _ = make(50, torch.Generator().manual_seed(13))
    for step in range(STEPS):
        ids, target, weight = make(BATCH, g)
        optim.zero_grad()
        loss = pipe.from_last(pipe.train_step(ids, target, weight))
        norm = pipe.square_sum([(n, p.grad) for n, p in stage.named_parameters()]).sqrt()
        for p in stage.parameters():
            p.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        optim.step()
        if step % 10 == 9:
            val, acc = pipe.evaluate(vx, vy)
            size = pipe.square_sum(stage.named_parameters()).sqrt()
            if rank == 0:
                print(f"step {step + 1} loss {loss:.10f} valid {val:.10f} acc {acc:.6f} grad {norm:.10f} |w| {size:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
