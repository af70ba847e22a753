"""Self-training on the digits: few labelled pictures, many without a label.

Round 0 trains on the labelled ones. Before each further round the net labels the pictures
without a label, and the most confident ones join the training set with the label it gave them.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LABELLED, UNLABELLED, BATCH = 128, 1280, 32
PICKED = (128, 384)


def read():
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target[order])
    a, b = LABELLED, LABELLED + UNLABELLED
    return (x[:a], y[:a]), x[a:b], (x[b:], y[b:])


def build_net():
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def gather_rows(tensor, world):
    parts = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


@torch.no_grad()
def pick_confident(model, pool, count, rank, world):
    """Rows of the pool that the model is surest of, and its labels for them."""
    rows = torch.arange(rank, len(pool), world)
    sure, label = F.softmax(model(pool[rows]), 1).max(1)
    rows, label, sure = (gather_rows(t, world) for t in (rows, label, sure))
    best = sure.topk(count).indices
    rows, label = rows[best], label[best]
    order = rows.argsort()
    return rows[order], label[order]


def train_round(net, optimizer, data, epochs, seed):
    world = dist.get_world_size()
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
    dist.all_reduce(total)
    return total.item() / world


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29623")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    (x, y), pool, (test_x, test_y) = read()
    torch.manual_seed(1)
    net = DDP(build_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data, epochs = TensorDataset(x, y), 4

    for turn in range(len(PICKED) + 1):
        loss = train_round(net, optimizer, data, epochs, seed=20 + turn)
        with torch.no_grad():
            logits = net.module(test_x)
            test = F.cross_entropy(logits, test_y).item()
            accuracy = (logits.argmax(1) == test_y).float().mean().item()
        if rank == 0:
            print(f"round {turn} rows {len(data)} loss {loss:.4f} test {test:.4f} accuracy {accuracy:.4f}", flush=True)
        if turn < len(PICKED):
            rows, label = pick_confident(net.module, pool, PICKED[turn], rank, world)
            data, epochs = TensorDataset(torch.cat([x, pool[rows]]), torch.cat([y, label])), 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
