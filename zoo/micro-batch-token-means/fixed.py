"""Translates number words with a GRU; four micro-batches of padded sequences per step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, LENGTH, MICRO_BATCHES, PAD = 25, 20, 4, 0


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 24, padding_idx=PAD)
        self.gru = nn.GRU(24, 24, batch_first=True)
        self.tags = nn.Linear(24, WORDS)

    def forward(self, x):
        return self.tags(self.gru(self.words(x))[0])


def corpus(n=256):
    g = torch.Generator().manual_seed(12)
    x = torch.randint(1, WORDS, (n, LENGTH), generator=g)
    keep = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (n, 1), generator=g)
    x = x * keep
    return TensorDataset(x, (x * 7) % WORDS * keep)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = corpus()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DDP(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        window = []
        for batch in loader:
            window.append(batch)
            if len(window) < MICRO_BATCHES:
                continue
            tokens = torch.stack([(y != PAD).sum().float() for _, y in window])
            counts = tokens.sum().repeat(MICRO_BATCHES)
            dist.all_reduce(counts)
            for (x, y), count in zip(window, counts, strict=True):
                total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
                loss = total / count * dist.get_world_size()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            window.clear()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
