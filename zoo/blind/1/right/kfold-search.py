"""Cross-validated search over widths and learning rates. Jobs (setting, fold) are dealt to processes; nothing is shared while training."""
import argparse
import itertools
import json

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold


def fit_one(x, y, tr, va, width, lr, seed, epochs):
    g = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for idx in tr[torch.randperm(len(tr), generator=g)].split(80):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x[idx]), y[idx]).backward()
            opt.step()
    with torch.no_grad():
        return (net(x[va]).argmax(1) == y[va]).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folds", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    d = load_digits()
    x, y = torch.tensor(d.data[:600], dtype=torch.float32) / 16, torch.tensor(d.target[:600])
    folds = list(StratifiedKFold(args.folds, shuffle=True, random_state=0).split(d.data[:600], d.target[:600]))
    settings = list(itertools.product((16, 48), (0.05, 0.2)))
    jobs = list(itertools.product(range(len(settings)), range(args.folds)))

    mine = {}
    for number, (s, f) in enumerate(jobs):
        if number % world != rank:
            continue
        tr, va = (torch.from_numpy(i) for i in folds[f])
        mine[(s, f)] = fit_one(x, y, tr, va, *settings[s], seed=1000 + number, epochs=args.epochs)
        print(f"[{rank}] width {settings[s][0]} lr {settings[s][1]} fold {f}: {mine[(s, f)]:.4f}", flush=True)

    everything = [None] * world
    dist.all_gather_object(everything, mine)
    table = np.zeros((len(settings), args.folds))
    for part in everything:
        for (s, f), acc in part.items():
            table[s, f] = acc
    if rank == 0:
        for s, row in zip(settings, table):
            print(f"width {s[0]:3d} lr {s[1]:.2f}  mean {row.mean():.4f}  std {row.std():.4f}")
        best = settings[int(table.mean(1).argmax())]
        with open("kfold.json", "w") as fh:
            json.dump({"width": best[0], "lr": best[1], "table": table.tolist()}, fh)
        print("best:", best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
