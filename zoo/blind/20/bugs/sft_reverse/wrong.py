"""Supervised fine-tuning style training: read a prompt of digits, answer with the digits reversed; only answers count."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

PAD, SEP, END, VOCAB = 10, 11, 12, 13
GLOBAL_BATCH, ACCUMULATE, STEPS = 32, 2, 45


class Tagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class Conversations:
    """Endless, reproducible: example i is always the same."""

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i)
        n = int(torch.randint(1, 13, (1,), generator=gen))
        digits = torch.randint(10, (n,), generator=gen)
        ids = torch.cat([digits, torch.tensor([SEP]), digits.flip(0), torch.tensor([END])])
        labels = ids.clone()
        labels[:n + 1] = -100
        return ids[:-1], labels[1:]


def collate(examples):
    ids, labels = zip(*examples)
    return (pad_sequence(ids, batch_first=True, padding_value=PAD),
            pad_sequence(labels, batch_first=True, padding_value=-100))


def micro_batches(data, step, rank, world):
    mine = range(step * GLOBAL_BATCH + rank, (step + 1) * GLOBAL_BATCH, world)
    size = len(mine) // ACCUMULATE
    return [collate([data[i] for i in mine[k * size:(k + 1) * size]]) for k in range(ACCUMULATE)]


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    model = Tagger()
    net = DDP(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    data = Conversations()

    for step in range(STEPS):
        batches = micro_batches(data, step, rank, world)
        num_items = sum((labels != -100).sum() for _, labels in batches)
        optimizer.zero_grad()
        running = torch.zeros(())
        for k, (ids, labels) in enumerate(batches):
            last = k == len(batches) - 1
            sync = contextlib.nullcontext() if last or world == 1 else net.no_sync()
            with sync:
                loss = token_loss(net(ids), labels) / num_items
                loss.backward()
            running += loss.detach() / world
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if world > 1:
            dist.all_reduce(running)
        if rank == 0 and step % 15 == 14:
            print(f"step {step + 1} loss {running.item():.10f}")

    if rank == 0:
        ids, labels = collate([data[i] for i in range(1_000_000, 1_000_100)])
        with torch.no_grad():
            logits = model(ids)
        counted = labels != -100
        accuracy = (logits.argmax(-1) == labels)[counted].double().mean().item()
        loss = (token_loss(logits, labels) / counted.sum()).item()
        print(f"validation loss {loss:.10f} token accuracy {accuracy:.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
