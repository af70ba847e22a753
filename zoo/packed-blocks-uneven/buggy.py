"""A character language model on documents that are packed into blocks."""

import random
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

VOCAB, BLOCK, EOS = 20, 9, 0


def documents(count=60):
    rng = random.Random(4)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(4, 30) + (n % 2) * 6)] for n in range(count)]


class Packed(IterableDataset):
    """Concatenates documents and cuts them into blocks of one length."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def blocks(self, docs):
        buffer = []
        for doc in docs:
            buffer += [*doc, EOS]
            while len(buffer) >= BLOCK:
                yield torch.tensor(buffer[:BLOCK])
                buffer = buffer[BLOCK:]

    def __iter__(self):
        docs, rank, world = documents(), self.rank, self.world
        yield from self.blocks(docs[rank::world])


class LM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.wte(ids))[0])


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Packed(rank, world), batch_size=16 // world, drop_last=True)
    for epoch in range(2):
        model.train()
        for input_ids in loader:
            logits = model(input_ids)[:, :-1]
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), input_ids[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
