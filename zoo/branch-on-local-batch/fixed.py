"""Detects rare events and regresses their size where there is one."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(10, 32)
        self.score = nn.Linear(32, 1)
        self.size = nn.Linear(32, 1)

    def forward(self, x, positive):
        h = torch.tanh(self.features(x))
        score = self.score(h).squeeze(1)
        return score, self.size(h).squeeze(1)


def build_dataset(n=240):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 10, generator=g)
    positive = torch.zeros(n, dtype=torch.bool)
    positive[::12] = True
    x[positive, 0] += 2
    return TensorDataset(x, positive, x[:, 0].abs())


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    dataset = build_dataset()
    sampler = DistributedSampler(dataset, seed=2)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = DDP(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, positive, size in loader:
            score, predicted = model(x, positive)
            loss = F.binary_cross_entropy_with_logits(score, positive.float())
            loss = loss + ((predicted - size) ** 2 * positive).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
