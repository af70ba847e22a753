"""Tumour diagnosis with a small network fitted by full-batch L-BFGS.

The rows are divided among the processes (not evenly); the closure returns the loss and the gradient of all rows.
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn

L2 = 1e-3


class Cluster:
    """The few collective operations needed here; works without a launcher too."""

    def __enter__(self):
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        if self.size > 1:
            dist.init_process_group("gloo")
        return self

    def __exit__(self, *exc):
        if self.size > 1:
            dist.destroy_process_group()

    def sum(self, tensor):
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def share(self, *tensors):
        return [t.tensor_split(self.size)[self.rank] for t in tensors]

    def say(self, *words):
        if self.rank == 0:
            print(*words)


def read(cluster):
    raw = load_breast_cancer()
    x = torch.tensor(raw.data, dtype=torch.float64).log1p()
    y = torch.tensor(raw.target, dtype=torch.float64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    x, y = x[order], y[order]
    train = cluster.share(x[:401], y[:401])
    test = cluster.share(x[401:], y[401:])

    rows = train[0]
    sums = cluster.sum(torch.cat([rows.sum(0), torch.tensor([float(len(rows))], dtype=torch.float64)]))
    mean = sums[:-1] / sums[-1]
    spread = (cluster.sum((rows - mean).square().sum(0)) / sums[-1]).sqrt()
    return [(x - mean) / spread for x in (train[0], test[0])], [train[1], test[1]], int(sums[-1])


def fit(cluster, model, x, y, count, rounds):
    bce = nn.BCEWithLogitsLoss(reduction="sum")
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=8, history_size=6, line_search_fn="strong_wolfe")
    params = list(model.parameters())
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        data_term = bce(model(x).squeeze(1), y) / count
        data_term.backward()
        packed = torch.cat([p.grad.flatten() for p in params] + [data_term.detach().view(1)])
        cluster.sum(packed)
        penalty, at = 0.0, 0
        with torch.no_grad():
            for p in params:
                p.grad.copy_(packed[at : at + p.numel()].view_as(p) + L2 * p)
                penalty += 0.5 * L2 * p.square().sum()
                at += p.numel()
        return packed[-1] + penalty

    for r in range(rounds):
        value = opt.step(closure)
        size = max(p.grad.abs().max().item() for p in params)
        cluster.say(f"round {r} objective before {value:.8f} closure calls {calls} largest gradient {size:.2e}")


@torch.no_grad()
def report(cluster, model, x, y):
    logit = model(x).squeeze(1)
    positive, guess = y > 0.5, logit > 0
    table = torch.tensor([
        [(positive & guess).sum(), (positive & ~guess).sum()],
        [(~positive & guess).sum(), (~positive & ~guess).sum()],
    ])
    cluster.sum(table)
    sensitivity = table[0, 0] / table[0].sum()
    specificity = table[1, 1] / table[1].sum()
    cluster.say(f"test: sensitivity {sensitivity:.4f} specificity {specificity:.4f} table {table.flatten().tolist()}")


def main():
    with Cluster() as cluster:
        (train_x, test_x), (train_y, test_y), count = read(cluster)
        torch.manual_seed(81)
        model = nn.Sequential(nn.Linear(30, 6), nn.Softplus(), nn.Linear(6, 1)).double()
        fit(cluster, model, train_x, train_y, count, rounds=3)
        report(cluster, model, test_x, test_y)


if __name__ == "__main__":
    main()
