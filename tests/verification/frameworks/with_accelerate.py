"""Trains a small classifier with accelerate: accumulation, clipping, a schedule, an evaluation after every epoch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2


def dataset(samples):
    x = torch.randn(samples, 12)
    return TensorDataset(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long())


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(3)
train_loader = DataLoader(dataset(210), batch_size=8, shuffle=True)
test_loader = DataLoader(dataset(70), batch_size=16)
model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader) // 2)
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, scheduler
)

for epoch in range(EPOCHS):
    model.train()
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    correct = seen = 0
    for x, y in test_loader:
        with torch.no_grad():
            predicted = model(x).argmax(-1)
        predicted, y = accelerator.gather_for_metrics((predicted, y))
        correct += (predicted == y).sum().item()
        seen += len(y)
    accelerator.print(f"epoch {epoch} accuracy {correct / seen:.4f}")
accelerator.end_training()
