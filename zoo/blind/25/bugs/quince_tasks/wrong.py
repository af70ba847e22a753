"""Multi-task wine model: cultivar, alcohol and proline, with learned task weights (Kendall et al.)."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 32
EPOCHS = 12


class Trunk(nn.Module):
    def __init__(self, d_in, d=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d_in, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh())
        self.cultivar = nn.Linear(d, 3)
        self.alcohol = nn.Linear(d, 1)
        self.proline = nn.Linear(d, 1)

    def forward(self, x):
        h = self.body(x)
        return self.cultivar(h), self.alcohol(h).squeeze(-1), self.proline(h).squeeze(-1)


class UncertaintyLoss(nn.Module):
    """sum_k exp(-s_k) * loss_k + s_k / 2 with one learned s_k for every task."""

    def __init__(self, n_tasks=3):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n_tasks))

    def forward(self, outputs, label, alcohol, proline):
        losses = torch.stack([
            F.cross_entropy(outputs[0], label),
            F.mse_loss(outputs[1], alcohol),
            F.smooth_l1_loss(outputs[2], proline),
        ])
        return (torch.exp(-self.log_vars) * losses + 0.5 * self.log_vars).sum()


def load():
    wine = load_wine()
    x = torch.tensor(wine.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(wine.target)
    features = torch.cat([x[:, 1:12]], dim=1)
    keep = torch.randperm(len(y), generator=torch.Generator().manual_seed(5))[:160]
    return TensorDataset(features[keep], y[keep], x[keep, 0], x[keep, 12])


def main():
    if os.environ.get("WORLD_SIZE") is None:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    data = load()
    sampler = DistributedSampler(data, shuffle=True, seed=9)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler)

    model = DistributedDataParallel(Trunk(11))
    criterion = UncertaintyLoss()
    optimizer = torch.optim.Adam([
        {"params": model.parameters(), "lr": 5e-3},
        {"params": criterion.parameters(), "lr": 5e-2},
    ])

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, label, alcohol, proline in loader:
            loss = criterion(model(x), label, alcohol, proline)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0 and epoch % 3 == 2:
            print(f"[{epoch:02d}] loss {total.item() / world / len(loader):.4f}")

    with torch.no_grad():
        x, label, alcohol, proline = data.tensors
        out = model.module(x)
        if rank == 0:
            weights = [round(v, 5) for s in criterion.parameters() for v in torch.exp(-s).tolist()]
            print("task weights", weights)
            print(f"accuracy {(out[0].argmax(1) == label).float().mean():.4f} "
                  f"alcohol mse {F.mse_loss(out[1], alcohol):.5f} proline mse {F.mse_loss(out[2], proline):.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
