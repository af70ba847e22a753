"""LoRA fine-tuning of a frozen language model on a stream of sentences of unequal length.

As in the big trainers, the loss of an optimizer step is a mean over all its target tokens.
"""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

VOCAB, WIDTH, STEP_BATCH, ACCUMULATION, STEPS, PAD = 40, 32, 32, 2, 16, -100


class Sentences(torch.utils.data.IterableDataset):
    """Every world-th sentence of the stream, counted from this rank."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        g = torch.Generator().manual_seed(606)
        for number in range(STEP_BATCH * STEPS):
            length = int(torch.randint(4, 22, (1,), generator=g))
            stride = int(torch.randint(1, 4, (1,), generator=g))
            start = int(torch.randint(0, VOCAB, (1,), generator=g))
            noise = torch.rand(length, generator=g) < 0.05
            if number % self.world == self.rank:
                ids = (start + stride * torch.arange(length)) % VOCAB
                yield torch.where(noise, (ids * 7 + 1) % VOCAB, ids)


def collate(sentences):
    inputs = pad_sequence([s[:-1] for s in sentences], batch_first=True)
    labels = pad_sequence([s[1:] for s in sentences], batch_first=True, padding_value=PAD)
    return inputs, labels


class LoRA(nn.Module):
    def __init__(self, base, r=4, alpha=8, dropout=0.1):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, r, bias=False), nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
        self.dropout, self.scale = nn.Dropout(dropout), alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(self.dropout(x)))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        h = self.rnn(self.embed(ids))[0]
        return self.head(h + self.mlp(h))


def add_lora(model):
    model.requires_grad_(False)
    model.mlp[0], model.mlp[2], model.head = LoRA(model.mlp[0]), LoRA(model.mlp[2]), LoRA(model.head, r=8)
    return model


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(52)
    net = add_lora(Base())
    model = DDP(net) if world > 1 else net
    trainable = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=STEPS)
    torch.manual_seed(52 + rank)

    loader = torch.utils.data.DataLoader(Sentences(rank, world), batch_size=STEP_BATCH // world // ACCUMULATION,
                                         collate_fn=collate)
    stream = iter(loader)
    model.train()
    for step in range(STEPS):
        micro = [next(stream) for _ in range(ACCUMULATION)]
        num_items = torch.stack([(labels != PAD).sum() for _, labels in micro]).sum()
        if world > 1:
            dist.all_reduce(num_items)
        seen = torch.zeros(())
        for i, (inputs, labels) in enumerate(micro):
            last = i == ACCUMULATION - 1
            with nullcontext() if last or world == 1 else model.no_sync():
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")
                (loss * world / num_items).backward()
            seen += loss.detach() / num_items
        nn.utils.clip_grad_norm_(trainable, 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        if world > 1:
            dist.all_reduce(seen)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1}: tokens {num_items} loss {seen:.6f}")

    model.eval()
    score = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for number in range(rank, 30, world):
            ids = (number + (1 + number % 3) * torch.arange(12)) % VOCAB
            score[0] += (net(ids[None, :-1]).argmax(-1)[0] == ids[1:]).sum()
            score[1] += len(ids) - 1
    if world > 1:
        dist.all_reduce(score)
        dist.destroy_process_group()
    if rank == 0:
        print(f"next-token accuracy {score[0] / score[1]:.3f} on {int(score[1])} tokens")


if __name__ == "__main__":
    main()
