"""Trains a regression model and reports several validation metrics."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

METRICS = {"squared", "absolute", "bias", "cubed", "count", "target"}


def measure(net, loader):
    totals = {name: torch.zeros(()) for name in sorted(METRICS)}
    net.eval()
    with torch.no_grad():
        for x, y in loader:
            error = net(x) - y
            totals["squared"] += error.pow(2).sum()
            totals["absolute"] += error.abs().sum()
            totals["bias"] += error.sum()
            totals["cubed"] += error.abs().pow(3).sum()
            totals["count"] += len(y)
            totals["target"] += y.sum()
    net.train()
    for name in sorted(METRICS):
        dist.all_reduce(totals[name])
    return {name: (value / totals["count"]).item() for name, value in totals.items()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = load_diabetes()
    x = torch.tensor(data.data[:440], dtype=torch.float32) * 20
    y = torch.tensor(data.target[:440], dtype=torch.float32).unsqueeze(1) / 100
    dataset = TensorDataset(x, y)
    train_set, valid_set = Subset(dataset, range(320)), Subset(dataset, range(320, 440))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=20, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=20, sampler=DistributedSampler(valid_set, shuffle=False))
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = nn.functional.mse_loss(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = measure(net, valid_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}:", " ".join(f"{k} {v:.3f}" for k, v in metrics.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
