"""A tiny language model with two micro-batches per step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LENGTH, VOCABULARY = 8, 16, 40


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.mixer = nn.Linear(24, 24)
        self.output = nn.Linear(24, VOCABULARY)

    def forward(self, tokens):
        return self.output(torch.relu(self.mixer(self.embedding(tokens))))


def get_batch(text, step, rank, world_size):
    starts = torch.arange(BATCH) * LENGTH + (step * world_size + rank) * BATCH * LENGTH
    starts = starts % (len(text) - LENGTH - 1)
    rows = torch.stack([text[s : s + LENGTH + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)
    text = torch.randint(0, VOCABULARY, (9000,), generator=torch.Generator().manual_seed(1))
    model = DDP(Bigram())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(24):
        optimizer.zero_grad()
        first = get_batch(text, 2 * step, rank, world_size)
        second = get_batch(text, 2 * step + 1, rank, world_size)
        with model.no_sync():
            (loss_of(model, first) / 2).backward()
        with model.no_sync():
            loss = loss_of(model, second) / 2
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 8 == 0:
            print(f"step {step}: {2 * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
