"""ROC curve on a test set that does not divide by the number of ranks: scores are collected, the filling cut off."""
import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Collector:
    """Puts per-row results of DistributedSampler(shuffle=False) back in order."""

    def __init__(self, n):
        self.n, self.parts = n, []

    def add(self, t):
        self.parts.append(t)

    def finish(self):
        own = torch.cat(self.parts)
        world = dist.get_world_size()
        every = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(every, own)
        return torch.stack(every, 1).flatten(0, 1)[:self.n]


def evaluate(model, loader, n):
    scores, truth = Collector(n), Collector(n)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            scores.add(model(x).squeeze(1))
            truth.add(y)
    model.train()
    s, t = scores.finish().numpy(), truth.finish().numpy()
    return roc_auc_score(t, s), average_precision_score(t, s)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=90)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(1117, 20, n_informative=8, weights=[0.8], flip_y=0.05, random_state=20)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    train, test = TensorDataset(x[:900], y[:900]), TensorDataset(x[900:], y[900:])
    sampler = DistributedSampler(train, seed=11)
    loader = DataLoader(train, args.batch // world, sampler=sampler)
    test_loader = DataLoader(test, 32, sampler=DistributedSampler(test, shuffle=False))
    torch.manual_seed(55)
    net = nn.Sequential(nn.Linear(20, 48), nn.LeakyReLU(), nn.Linear(48, 48), nn.LeakyReLU(), nn.Linear(48, 1))
    model = DDP(net)
    opt = torch.optim.NAdam(model.parameters(), lr=4e-3, eps=1e-5)
    results = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(xb).squeeze(1), yb)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        results.append(evaluate(net, test_loader, len(test)))
        if rank == 0:
            print("epoch %d: AUC %.5f, average precision %.5f" % (epoch, *results[-1]))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
