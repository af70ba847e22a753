"""Classifies sequences with an LSTM and two micro-batches per step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


class SequenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 16, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        return self.out(hidden[-1])


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad /= ACCUMULATE
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    x = torch.randn(256, 10, 4)
    dataset = TensorDataset(x, x.mean(1)[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(SequenceClassifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (bx, by) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(bx), by) / ACCUMULATE
            loss.backward()
            if i % ACCUMULATE == 0:
                step(model, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
