"""A language model on batches of like lengths, with token-weighted loss and an accumulation tail."""

import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, VOCAB = 0, 18


class Sentences(Dataset):
    def __init__(self, n=80):
        rng = random.Random(8)
        self.rows = [torch.tensor([rng.randrange(1, VOCAB) for _ in range(rng.randint(3, 14))]) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Buckets:
    """A batch sampler: whole batches by length, shuffled, each cut over the ranks."""

    def __init__(self, data, size, rank, world):
        self.order = sorted(range(len(data)), key=lambda i: len(data[i]))
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def __len__(self):
        return len(self.order) // self.size

    def __iter__(self):
        batches = [self.order[i : i + self.size] for i in range(0, len(self.order), self.size)]
        random.Random(self.epoch).shuffle(batches)
        for batch in batches:
            yield batch[self.rank :: self.world]


class LM(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.emb, self.lstm, self.out = (
            nn.Embedding(VOCAB, d, padding_idx=PAD),
            nn.LSTM(d, d, batch_first=True),
            nn.Linear(d, VOCAB),
        )

    def forward(self, ids):
        return self.out(self.lstm(self.emb(ids))[0])


def main(accumulate=2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Sentences()
    batches = Buckets(data, 16, rank, world)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=lambda rows: pad_sequence(rows, batch_first=True))
    model = DDP(LM())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        batches.epoch = epoch
        waiting, count = list(loader), torch.zeros(())
        for start in range(0, len(waiting), accumulate):
            window = waiting[start : start + accumulate]
            tokens = sum((ids[:, 1:] != PAD).sum() for ids in window).float()
            dist.all_reduce(tokens)
            for k, ids in enumerate(window):
                with nullcontext() if k == len(window) - 1 else model.no_sync():
                    logits = model(ids[:, :-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
                    (loss * world / tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            count += tokens
        if rank == 0:
            print(f"epoch {epoch} tokens {int(count)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
