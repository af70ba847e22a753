"""Metric learning on digits: pull pairs together, push others apart; recall@1 on held-out images."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAIRS = 64


def pair_batch(labels, g):
    left = torch.randint(len(labels), (PAIRS,), generator=g)
    right = torch.randint(len(labels), (PAIRS,), generator=g)
    for k in range(0, PAIRS, 2):
        same = (labels == labels[left[k]]).nonzero().squeeze(1)
        right[k] = same[torch.randint(len(same), (1,), generator=g)]
    return left, right


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def recall_at_1(encoder, x, y, rank, world):
    with torch.no_grad():
        queries = encoder(x[rank::world])
    labels = y[rank::world]
    gallery, gallery_labels = queries, labels
    near = (queries @ gallery.T).topk(2, dim=1).indices[:, 1]
    hits = torch.tensor([(gallery_labels[near] == labels).sum(), len(labels)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1397], y[:1397], x[1397:], y[1397:]

    torch.manual_seed(3)
    encoder = DDP(Encoder().double())
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.005)
    g = torch.Generator().manual_seed(3)
    for step in range(45):
        left, right = (t[rank::world] for t in pair_batch(train_y, g))
        target = torch.where(train_y[left] == train_y[right], 1.0, -1.0).double()
        a, b = encoder(torch.cat([train_x[left], train_x[right]])).chunk(2)
        loss = F.cosine_embedding_loss(a, b, target, margin=0.3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 14:
            recall = recall_at_1(encoder.module, test_x, test_y, rank, world)
            if rank == 0:
                print(f"step {step + 1}: recall@1 {recall:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
