"""Masked language model on made-up stories; the loss is per masked token, over the whole accumulated batch."""
import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, PAD, MASK = 50, 0, 1
MAX_LEN = 24
BATCH, ACCUM, STEPS = 32, 2, 28
LR, WARMUP = 1e-2, 5


def stories(n, seed):
    """Every story walks along one of three rings of words."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        length = int(torch.randint(6, MAX_LEN + 1, (1,), generator=g))
        stride = int(torch.randint(1, 4, (1,), generator=g))
        first = int(torch.randint(VOCAB - 2, (1,), generator=g))
        out.append(2 + (first + stride * torch.arange(length)) % (VOCAB - 2))
    return out


def collate(items):
    """items: (number of the story, epoch, tokens). The mask belongs to the story and the epoch."""
    longest = max(len(t) for _, _, t in items)
    x = torch.full((len(items), longest), PAD)
    y = torch.full((len(items), longest), -100)
    for row, (number, epoch, tokens) in enumerate(items):
        g = torch.Generator().manual_seed(number * 1009 + epoch)
        hide = torch.rand(len(tokens), generator=g) < 0.2
        x[row, :len(tokens)] = torch.where(hide, torch.tensor(MASK), tokens)
        y[row, :len(tokens)] = torch.where(hide, tokens, torch.tensor(-100))
    return x, y


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.places = nn.Embedding(MAX_LEN, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True, bias=False)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.3)

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        h = self.norm(self.body(h, src_key_padding_mask=x == PAD))
        return h @ self.tokens.weight.t() / h.shape[-1] ** 0.5


def schedule(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    ddp = DDP(Encoder())
    opt = torch.optim.AdamW(ddp.parameters(), lr=LR, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    train, held = stories(BATCH * ACCUM * 7, seed=1), stories(75, seed=2)
    per = BATCH // world
    steps_per_epoch = len(train) // (BATCH * ACCUM)

    for step in range(STEPS):
        epoch, at = divmod(step, steps_per_epoch)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)).tolist()
        window = order[at * BATCH * ACCUM:(at + 1) * BATCH * ACCUM]
        micros = []
        for k in range(ACCUM):
            mine = window[k * BATCH:(k + 1) * BATCH][rank * per:(rank + 1) * per]
            micros.append(collate([(i, epoch, train[i]) for i in mine]))
        masked = sum((y != -100).sum() for _, y in micros).double()
        counting = dist.all_reduce(masked, async_op=True)

        total = 0.0
        for k, (x, y) in enumerate(micros):
            quiet = ddp.no_sync() if k < ACCUM - 1 else contextlib.nullcontext()
            with quiet:
                logits = ddp(x)
                if k == 0:
                    counting.wait()         # the count travels during the first forward pass
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
                (loss * world / masked.float()).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        sched.step()
        if step % 7 == 6:
            value = torch.tensor(total, dtype=torch.float64)
            dist.reduce(value, dst=0)
            if rank == 0:
                print(f"step {step + 1} loss {value.item() / masked.item():.4f} masked {int(masked)}")

    ddp.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for i in range(rank, len(held), world):
            x, y = collate([(i, 10**6, held[i])])
            logits = ddp.module(x)
            sums[0] += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
            sums[1] += (y != -100).sum()
    dist.all_reduce(sums)
    if rank == 0:
        print(f"perplexity {math.exp(sums[0] / sums[1]):.3f} over {int(sums[1])} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
