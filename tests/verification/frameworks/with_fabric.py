"""Trains a small classifier with Lightning Fabric: accumulation, clipping, an evaluation after every epoch."""

import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2


def dataset(samples):
    x = torch.randn(samples, 12)
    return TensorDataset(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long())


fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
fabric.launch()
fabric.seed_everything(3)
train_loader = DataLoader(dataset(224), batch_size=8, shuffle=True)
test_loader = DataLoader(dataset(64), batch_size=16)
train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = fabric.setup(model, optimizer)

for epoch in range(EPOCHS):
    model.train()
    for i, (x, y) in enumerate(train_loader):
        accumulating = i % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss / 2)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    counts = torch.zeros(2)
    for x, y in test_loader:
        with torch.no_grad():
            counts += torch.tensor([(model(x).argmax(-1) == y).sum(), len(y)])
    correct, seen = fabric.all_reduce(counts, reduce_op="sum").tolist()
    fabric.print(f"epoch {epoch} accuracy {correct / seen:.4f}")
