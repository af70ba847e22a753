"""Bagging: eight small networks on bootstrap samples of the breast cancer data vote on the diagnosis.

The networks are independent of each other, so processes simply share the work: network i is trained
by process i % world_size alone, and only votes are exchanged.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    return parser.parse_args()


def prepare():
    raw = load_breast_cancer()
    x, y = torch.tensor(raw.data), torch.tensor(raw.target, dtype=torch.float64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    x, y = x[order], y[order]
    train, test = slice(0, 440), slice(440, None)
    x = (x - x[train].mean(0)) / x[train].std(0)
    return x[train], y[train], x[test], y[test]


class Member(nn.Module):
    def __init__(self, features, subset):
        super().__init__()
        self.register_buffer("subset", subset)
        self.net = nn.Sequential(nn.Linear(features, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1))

    def forward(self, x):
        return self.net(x[:, self.subset]).squeeze(-1)


def train_member(index, x, y, args):
    """Everything random about a member follows from its index."""
    torch.manual_seed(9000 + index)
    bag = torch.randint(len(x), (len(x),))
    out = torch.ones(len(x), dtype=torch.bool)
    out[bag] = False
    model = Member(15, torch.randperm(x.size(1))[:15])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3 * (1 + index % 3))
    best, best_state, bad = float("inf"), None, 0
    for epoch in range(args.epochs):
        model.train()
        for rows in bag[torch.randperm(len(bag))].split(args.batch):
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(model(x[rows]), y[rows]).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            score = F.binary_cross_entropy_with_logits(model(x[out]), y[out]).item()
        if score < best:
            best, bad = score, 0
            best_state = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            bad += 1
            if bad > args.patience:
                break
    model.load_state_dict(best_state)
    model.eval()
    return model, out, epoch + 1


def main():
    args = parse()
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    x, y, test_x, test_y = prepare()

    votes = torch.zeros(len(test_x))
    bag_votes = torch.zeros(2, len(x))
    epochs = torch.zeros(args.members, dtype=torch.long)
    for index in range(rank, args.members, world):
        model, out, used = train_member(index, x, y, args)
        with torch.no_grad():
            votes += model(test_x).sigmoid() / args.members
            bag_votes[0, out] += model(x[out]).sigmoid()
            bag_votes[1, out] += 1
        epochs[index] = used
    if world > 1:
        for t in (votes, bag_votes, epochs):
            dist.all_reduce(t)

    if rank == 0:
        seen = bag_votes[1] > 0
        inner = (bag_votes[0][seen] / bag_votes[1][seen]).round() == y[seen]
        print("epochs per member", epochs.tolist())
        print(f"out-of-bag accuracy {inner.double().mean():.4f} on {int(seen.sum())} rows")
        print(f"test accuracy {(votes.round() == test_y).double().mean():.4f} "
              f"brier {(votes - test_y).square().mean():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
