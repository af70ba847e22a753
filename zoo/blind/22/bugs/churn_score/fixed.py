"""Customer churn classifier; the best epoch is chosen by validation F1."""
import copy
import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_default_dtype(torch.float64)

BATCH = 64
EPOCHS = 4


def load_customers():
    x, y = make_classification(
        n_samples=2200, n_features=18, n_informative=7, n_redundant=4,
        weights=[0.88], flip_y=0.04, class_sep=0.9, random_state=12)
    x, y = torch.tensor(x), torch.tensor(y, dtype=torch.float64)
    mean, std = x[:1600].mean(0), x[:1600].std(0)
    x = (x - mean) / std
    return TensorDataset(x[:1600], y[:1600]), TensorDataset(x[1600:], y[1600:])


class ChurnNet(nn.Module):
    def __init__(self, features=18, hidden=40):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def f1_score(counts):
    tp, fp, fn = counts
    return 2 * tp / (2 * tp + fp + fn).clamp(min=1)


@torch.no_grad()
def validate(model, dataset, rank, world):
    model.eval()
    x, y = (t[rank::world] for t in dataset.tensors)
    predicted = model(x) > -0.4
    actual = y > 0.5
    counts = torch.stack([
        (predicted & actual).sum(),
        (predicted & ~actual).sum(),
        (~predicted & actual).sum(),
    ]).double()
    dist.all_reduce(counts)
    score = f1_score(counts)
    model.train()
    return score.item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    train, val = load_customers()
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=4)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)
    torch.manual_seed(21)
    model = DDP(ChurnNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    pos_weight = torch.tensor(2.0)

    best_f1, best_epoch, best_state = -1.0, None, None
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y, pos_weight=pos_weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        f1 = validate(model.module, val, rank, world)
        if f1 > best_f1:
            best_f1, best_epoch = f1, epoch
            best_state = copy.deepcopy(model.module.state_dict())
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / (len(loader) * world):.6f} val f1 {f1:.6f}")

    model.module.load_state_dict(best_state)
    if rank == 0:
        checksum = sum(p.abs().sum() for p in model.module.parameters())
        print(f"kept epoch {best_epoch} f1 {best_f1:.6f} weights {checksum.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
