"""Language model cut into stages, GPipe schedule, input and output embedding shared."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD, STAGE = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
FIRST, LAST = STAGE == 0, STAGE == WORLD - 1
VOCAB, WIDTH, LENGTH, DEPTH = 40, 24, 10, 4
BATCH, MICRO = 32, 4


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.past = nn.Conv1d(WIDTH, WIDTH, 3)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x):
        y = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        x = x + self.past(y).transpose(1, 2)
        return x + self.mlp(x)


class Stage(nn.Module):
    def __init__(self, blocks, embedding, norm):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.embedding = embedding if FIRST or LAST else None
        self.norm = norm if LAST else None

    def forward(self, x):
        if FIRST:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if LAST:
            x = F.linear(self.norm(x), self.embedding.weight)
        return x


def build():
    torch.manual_seed(23)
    embedding = nn.Embedding(VOCAB, WIDTH)
    nn.init.normal_(embedding.weight, std=0.3)
    blocks = [Mixer() for _ in range(DEPTH)]
    per = DEPTH // WORLD
    return Stage(blocks[STAGE * per:(STAGE + 1) * per], embedding, nn.LayerNorm(WIDTH))


def forward(stage, ids):
    rows = len(ids)
    if FIRST:
        x = ids
    else:
        x = torch.empty(rows, LENGTH, WIDTH)
        dist.recv(x, src=STAGE - 1)
        x.requires_grad_(torch.is_grad_enabled())
    out = stage(x)
    if not LAST:
        dist.send(out.detach().contiguous(), dst=STAGE + 1)
    return x, out


def token_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")


def train_step(stage, ids, target):
    tokens = (target >= 0).sum()
    flying = [(forward(stage, i), t) for i, t in zip(ids.split(BATCH // MICRO), target.split(BATCH // MICRO))]
    for (x, out), t in flying:
        if LAST:
            (token_loss(out, t) / tokens).backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, src=STAGE + 1)
            out.backward(grad)
        if not FIRST:
            dist.send(x.grad.contiguous(), dst=STAGE - 1)


def finish(stage, ends, limit):
    if WORLD > 1 and (FIRST or LAST):
        dist.all_reduce(stage.embedding.weight.grad, group=ends)
    counted = [p for p in stage.parameters() if FIRST or stage.embedding is None or p is not stage.embedding.weight]
    square = sum(p.grad.square().sum() for p in counted)
    if WORLD > 1:
        dist.all_reduce(square)
    factor = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in stage.parameters():
        p.grad.mul_(factor)


def text(n, seed):
    gen = torch.Generator().manual_seed(seed)
    s = torch.randint(0, VOCAB, (n, 1), generator=gen)
    for _ in range(LENGTH):
        s = torch.cat([s, (s[:, -1:] * 7 + s[:, :1] + torch.randint(0, 2, (n, 1), generator=gen)) % VOCAB], 1)
    target = s[:, 1:].clone()
    visible = torch.randint(3, LENGTH + 1, (n, 1), generator=gen)
    target[torch.arange(LENGTH) >= visible] = -1
    return s[:, :-1], target


def main():
    ends = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        ends = dist.new_group([0, WORLD - 1])
    torch.set_default_dtype(torch.float64)
    stage = build()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    ids, target = text(256, seed=1)
    for step in range(30):
        rows = torch.randperm(len(ids), generator=torch.Generator().manual_seed(step))[:BATCH]
        optimizer.zero_grad()
        train_step(stage, ids[rows], target[rows])
        finish(stage, ends, limit=1.0)
        optimizer.step()
        scheduler.step()

    ids, target = text(64, seed=2)
    score = torch.zeros(1)
    with torch.no_grad():
        _, out = forward(stage, ids)
        if LAST:
            score += token_loss(out, target) / (target >= 0).sum()
    if WORLD > 1:
        dist.broadcast(score, src=WORLD - 1)
    if FIRST:
        print(f"test loss {score.item():.10f}, embedding norm {stage.embedding.weight.norm().item():.10f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
