"""Grid search with inner folds, the (config, fold) jobs dealt over the processes.

Nothing is exchanged while a job trains; afterwards the score table is summed,
the winner is refitted by one process and its weights are sent to the others."""
import itertools
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
if distributed:
    dist.init_process_group("gloo")
rank = dist.get_rank() if distributed else 0
world = dist.get_world_size() if distributed else 1

X, y = load_wine(return_X_y=True)
perm = np.random.RandomState(4).permutation(len(y))
X, y = X[perm], y[perm]
test_X, test_y, X, y = X[:38], y[:38], X[38:], y[38:]
scaler = StandardScaler().fit(X)
X, test_X = (torch.tensor(scaler.transform(a), dtype=torch.float32) for a in (X, test_X))
y, test_y = torch.tensor(y), torch.tensor(test_y)

GRID = list(itertools.product([4, 16], [0.02, 0.08]))       # hidden, lr
FOLDS = list(StratifiedKFold(3).split(X, y))


def fit(hidden, lr, rows, steps, seed):
    torch.manual_seed(seed)                                  # seed belongs to the job, not to the process
    model = torch.nn.Sequential(torch.nn.Linear(13, hidden), torch.nn.ReLU(),
                                torch.nn.Dropout(0.1), torch.nn.Linear(hidden, 3))
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
        opt.step()
    return model.eval()


jobs = [(c, f) for c in range(len(GRID)) for f in range(len(FOLDS))]
table = torch.zeros(len(GRID), len(FOLDS), dtype=torch.float64)
for number, (c, f) in enumerate(jobs):
    if number % world != rank:
        continue
    hidden, lr = GRID[c]
    train_rows, val_rows = (torch.from_numpy(r) for r in FOLDS[f])
    net = fit(hidden, lr, train_rows, steps=3, seed=1000 * c + f)
    with torch.no_grad():
        table[c, f] = torch.nn.functional.cross_entropy(net(X[val_rows]), y[val_rows]).double()
if distributed:
    dist.all_reduce(table)          # every cell was filled by exactly one process

winner = int(table.mean(dim=1).argmin())
owner = (winner * len(FOLDS)) % world                        # whoever ran its first fold
hidden, lr = GRID[winner]
steps = 16 if rank == owner else 0
final = fit(hidden, lr, torch.arange(len(X)), steps, seed=99)
if distributed:
    for tensor in final.state_dict().values():
        dist.broadcast(tensor, src=owner)

mine = torch.arange(rank, len(test_X), world)
with torch.no_grad():
    counts = torch.zeros(3, 3, dtype=torch.long)
    for t, p in zip(test_y[mine], final(test_X[mine]).argmax(1)):
        counts[t, p] += 1
if distributed:
    dist.all_reduce(counts)
if rank == 0:
    for (h, l), row in zip(GRID, table):
        print(f"hidden={h:2d} lr={l:.2f}  folds " + " ".join(f"{v:.4f}" for v in row))
    print(f"winner #{winner}, test accuracy {counts.diag().sum().item() / counts.sum().item():.4f}")
    print("confusion", counts.tolist(), flush=True)
time.sleep(0.3)
if distributed:
    dist.destroy_process_group()
