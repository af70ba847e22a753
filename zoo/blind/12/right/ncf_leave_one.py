"""Neural collaborative filtering (NeuMF) with sampled negatives and leave-one-out evaluation (HR@10, NDCG@10)."""
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

USERS, ITEMS, BATCH, EPOCHS, NEGATIVES = 150, 140, 512, 4, 3


def interactions(seed=7):
    """Positive items of each user, the last one is held out."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(USERS, 4)) @ rng.normal(size=(4, ITEMS)) + rng.gumbel(size=(USERS, ITEMS)) * 0.6
    train, held = [], []
    for user in range(USERS):
        liked = np.argsort(-scores[user])[: rng.integers(8, 20)]
        liked = rng.permutation(liked)
        train += [(user, item) for item in liked[1:]]
        held.append(liked[0])
    return np.array(train), np.array(held)


class NeuMF(nn.Module):
    def __init__(self, factors=8):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(USERS, factors), nn.Embedding(ITEMS, factors)
        self.user_mlp, self.item_mlp = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        self.mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
        self.out = nn.Linear(factors + 8, 1)
        for table in (self.user_gmf, self.item_gmf, self.user_mlp, self.item_mlp):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user, item):
        gmf = self.user_gmf(user) * self.item_gmf(item)
        mlp = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], -1))
        return self.out(torch.cat([gmf, mlp], -1)).squeeze(-1)


def epoch_samples(train, epoch):
    rng = np.random.default_rng([11, epoch])
    seen = set(map(tuple, train))
    users, items, marks = [], [], []
    for user, item in train:
        users += [user] * (1 + NEGATIVES)
        items.append(item)
        marks += [1.0] + [0.0] * NEGATIVES
        drawn = 0
        while drawn < NEGATIVES:
            other = int(rng.integers(ITEMS))
            if (user, other) not in seen:
                items.append(other)
                drawn += 1
    order = rng.permutation(len(users))
    return (torch.tensor(np.array(a)[order]) for a in (users, items, np.array(marks, dtype=np.float32)))


@torch.no_grad()
def evaluate(net, held, rank, world):
    ranks = {}
    for user in range(rank, USERS, world):
        rng = np.random.default_rng([13, user])
        candidates = torch.tensor(np.append(rng.permutation(np.delete(np.arange(ITEMS), held[user]))[:99], held[user]))
        scores = net(torch.full((100,), user), candidates)
        ranks[user] = int((scores[:-1] > scores[-1]).sum())
    parts = [ranks]
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, ranks)
    if rank == 0:
        merged = {u: r for part in parts for u, r in part.items()}
        hits = [r < 10 for r in merged.values()]
        gain = [1 / math.log2(r + 2) if r < 10 else 0.0 for r in merged.values()]
        print(f"  users {len(merged)} HR@10 {np.mean(hits):.4f} NDCG@10 {math.fsum(gain) / len(gain):.4f}", flush=True)


def main():
    rank, world = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(2024 + 10 * rank)
    net = NeuMF()
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, eps=1e-5)
    train, held = interactions()
    for epoch in range(EPOCHS):
        users, items, marks = epoch_samples(train, epoch)
        loss_sum = torch.zeros(())
        for start in range(0, len(users), BATCH):
            whole = slice(start, min(start + BATCH, len(users)))
            mine = np.array_split(np.arange(whole.start, whole.stop), world)[rank]
            logits = model(users[mine], items[mine])
            loss = F.binary_cross_entropy_with_logits(logits, marks[mine], reduction="sum") / (whole.stop - whole.start)
            optimizer.zero_grad()
            (loss * world).backward()
            optimizer.step()
            loss_sum += loss.detach() * (whole.stop - whole.start)
        if world > 1:
            dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch} loss {loss_sum.item() / len(users):.5f}", flush=True)
        evaluate(net, held, rank, world)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
