"""Digits: train a small network on the even classes, then adapt it to the odd ones with low-rank adapters."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 64
RANK_LORA, ALPHA = 4, 8.0


class LoRALinear(nn.Module):
    def __init__(self, base, gen):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK_LORA, base.in_features, generator=gen) / base.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK_LORA))

    def forward(self, x):
        return self.base(x) + (ALPHA / RANK_LORA) * (x @ self.a.T) @ self.b.T


def add_adapters(model):
    gen = torch.Generator().manual_seed(55)
    model.requires_grad_(False)
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRALinear(child, gen))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 48)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


def load(parity):
    digits = load_digits()
    x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    keep = y % 2 == parity
    return x[keep], y[keep] // 2


def wrap(model, world):
    return DDP(model) if world > 1 else model


def fit(net, x, y, epochs, lr, rank, world):
    dataset = TensorDataset(x[:768], y[:768])
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=1)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler)
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        net.train()
        for xb, yb in loader:
            loss = F.cross_entropy(net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    logits = model(x[768:])
    return F.cross_entropy(logits, y[768:]).item(), (logits.argmax(-1) == y[768:]).double().mean().item()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(17)
    model = Classifier()
    net = wrap(model, world)

    x, y = load(0)
    fit(net, x, y, 3, 3e-3, rank, world)
    if rank == 0:
        print("even digits: loss %.10f accuracy %.4f" % evaluate(model, x, y))

    add_adapters(model)
    x, y = load(1)
    fit(net, x, y, 4, 5e-3, rank, world)
    if rank == 0:
        print("odd digits: loss %.10f accuracy %.4f" % evaluate(model, x, y))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
