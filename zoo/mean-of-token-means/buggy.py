"""A character model on sentences of very different lengths, padded with -100."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, LONGEST = 30, 24


class Sentences(Dataset):
    def __init__(self, n=192):
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, VOCABULARY, (n, LONGEST + 1), generator=generator)
        self.lengths = torch.randint(2, LONGEST + 1, (n,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        row, length = self.tokens[index], self.lengths[index]
        targets = row[1:].clone()
        targets[length:] = -100
        return row[:-1], targets


class CharModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Sentences()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(CharModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for tokens, targets in loader:
            logits = model(tokens)
            count = (targets != -100).sum()
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
