# Curriculum, then hard example mining with a table of per sample losses
import os, time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from sklearn.datasets import load_digits

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30117")

BATCH, EPOCHS, CURRICULUM_EPOCHS, N = 64, 8, 3, 1400


class LossTable:
    """Last seen loss of each training example. A process writes the rows of its own examples, sync() fills in the rest."""

    def __init__(self, n):
        self.value = torch.zeros(n, dtype=torch.float64)
        self.reset()

    def reset(self):
        self.fresh = torch.zeros(len(self.value), dtype=torch.float64)
        self.touched = torch.zeros(len(self.value), dtype=torch.float64)

    def write(self, ids, losses):
        self.fresh[ids] = losses.detach().double()
        self.touched[ids] = 1

    def sync(self):
        dist.all_reduce(self.fresh)
        dist.all_reduce(self.touched)
        self.value = torch.where(self.touched > 0, self.fresh, self.value)
        self.reset()


class CurriculumHardSampler:
    def __init__(self, difficulty, table, seed=0):
        self.easy_first = difficulty.argsort()
        self.table, self.g = table, torch.Generator().manual_seed(seed)

    def epoch(self, e):
        if e < CURRICULUM_EPOCHS:
            # starts with the easiest third
            pool = self.easy_first[:int(N * (e + 1) / CURRICULUM_EPOCHS)]
            ids = pool[torch.randperm(len(pool), generator=self.g)]
        else:
            ranked = self.table.value.argsort(descending=True, stable=True)
            # as a set: the order among nearly equal losses is no information
            hard, rest = ranked[:N // 4].sort().values, ranked[N // 4:].sort().values
            rest = rest[torch.randperm(len(rest), generator=self.g)[:N // 4]]
            ids = torch.cat([hard, rest])
            ids = ids[torch.randperm(len(ids), generator=self.g)]
        return ids[:len(ids) // BATCH * BATCH].split(BATCH)


def average_gradients(model):
    """Gradients are averaged over workers, see the distributed tutorial"""
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def per_class_recall(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    cm = torch.zeros(10, 10, dtype=torch.long)
    with torch.no_grad():
        pred = model(x[rank::world]).argmax(1)
    cm.index_put_((y[rank::world], pred), torch.ones(len(pred), dtype=torch.long), accumulate=True)
    dist.all_reduce(cm)
    return cm.diag().float() / cm.sum(1).clamp_min(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    # difficulty: distance from the class mean
    means = torch.stack([x[:N][y[:N] == c].mean(0) for c in range(10)])
    table = LossTable(N)
    sampler = CurriculumHardSampler((x[:N] - means[y[:N]]).norm(dim=1), table)
    steps = 0
    for e in range(EPOCHS):
        for ids in sampler.epoch(e):
            ids = ids[rank::world]
            opt.zero_grad()
            losses = F.cross_entropy(model(x[ids]), y[ids], reduction="none")
            table.write(ids, losses)
            losses.mean().backward()
            average_gradients(model)
            opt.step()
            steps += 1
        table.sync()
        recall = per_class_recall(model, x[N:], y[N:])
        if rank == 0:
            print(f"epoch {e} steps {steps} mean table {table.value.mean():.5f} worst class {recall.min():.3f} macro recall {recall.mean():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
