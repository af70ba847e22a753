"""A small text classifier with a test accuracy per epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS = 40


class Texts(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, WORDS, (n, 10), generator=g)
        self.labels = (self.tokens.float().mean(1) > WORDS / 2).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"tokens": self.tokens[i], "label": self.labels[i]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, tokens):
        return self.out(self.words(tokens).mean(1))


@torch.no_grad()
def test_accuracy(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for batch in loader:
        predicted = model(batch["tokens"]).argmax(1)
        counts[0] += (predicted == batch["label"]).sum()
        counts[1] += len(predicted)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    train_set, test_set = Texts(256, 1), Texts(128, 2)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=16, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=16, sampler=DistributedSampler(test_set, shuffle=False))
    model = DDP(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        for batch in train_loader:
            loss = F.cross_entropy(model(batch["tokens"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = test_accuracy(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
