"""Evaluation with all_gather_object: every sample once, scored with scikit-learn on the first rank."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def load():
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x, y = (x - x.mean(0)) / x.std(0), torch.tensor(data.target, dtype=torch.float32)
    return TensorDataset(x[:448], y[:448]), TensorDataset(x[448:], y[448:])


@torch.no_grad()
def evaluate(net, dataset):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    indices = range(rank, len(dataset), world_size)
    rows = []
    for x, y in DataLoader(Subset(dataset, indices), batch_size=32):
        rows += zip(net(x).sigmoid().flatten().tolist(), y.tolist(), strict=True)
    gathered = [None] * world_size
    dist.all_gather_object(gathered, list(zip(indices, rows, strict=True)))
    ordered = [row for _, row in sorted(item for part in gathered for item in part)]
    scores, labels = zip(*ordered, strict=True)
    return roc_auc_score(labels, scores), f1_score(labels, [score > 0.5 for score in scores])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = load()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=28, sampler=sampler)
    net = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            optimizer.step()
        auc, f1 = evaluate(net, test_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: auc {auc:.4f}, f1 {f1:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
