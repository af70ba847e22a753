"""Active learning: ask the mycologist for the 24 most doubtful specimens per round.

The pool is scored in shards; scores travel with padding, which is cut off before ranking, and
every process then asks for the same labels. The labelled set grows, so do the global batches."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import make_blobs

QUERIES, ROUNDS, STEPS = 24, 4, 9


def specimens():
    x, y = make_blobs(770, n_features=8, centers=6, cluster_std=4.0, random_state=9)
    x = (x - x.mean(0)) / x.std(0)
    return torch.from_numpy(x), torch.from_numpy(y)


def gather_uneven(values, total):
    """rank r holds values of rows r, r+world, ...; returns all of them in row order."""
    world = dist.get_world_size()
    longest = -(-total // world)
    padded = torch.full((longest,), -1.0, dtype=values.dtype)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.stack(parts, 1).flatten()[:total]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = specimens()
    pool_x, pool_y, test_x, test_y = x[:571], y[:571], x[571:], y[571:]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.ReLU(), torch.nn.Linear(24, 6)).double()
    labelled = sorted(np.random.default_rng(1).choice(571, 18, replace=False).tolist())
    for rnd in range(ROUNDS):
        opt = torch.optim.AdamW(model.parameters(), lr=0.02)          # a fresh optimizer every round
        for _ in range(STEPS):
            mine = torch.tensor(labelled[rank::world])
            loss = F.cross_entropy(model(pool_x[mine]), pool_y[mine], reduction="sum") / len(labelled)
            opt.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            opt.step()

        model.eval()
        with torch.no_grad():
            logp = model(pool_x[rank::world]).log_softmax(1)
            entropy = gather_uneven(-(logp.exp() * logp).sum(1), len(pool_x))
            matrix = torch.zeros(6, 6, dtype=torch.long)
            said = model(test_x[rank::world]).argmax(1)
            matrix.index_put_((test_y[rank::world], said), torch.ones_like(said), accumulate=True)
            dist.all_reduce(matrix)
        model.train()
        recall = (matrix.diag() / matrix.sum(1)).mean().item()
        if rank == 0:
            print(f"round {rnd}: {len(labelled)} labels, macro recall {recall:.5f}, mean doubt {entropy.mean().item():.5f}", flush=True)
        if rnd == ROUNDS - 1:
            break
        entropy[torch.tensor(labelled)] = -1.0
        asked = entropy.argsort(descending=True, stable=True)[:QUERIES].tolist()
        labelled = sorted(labelled + asked)

    if rank == 0:
        print("last questions:", asked[:8])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
