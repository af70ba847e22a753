"""L-BFGS with a line search: the closure runs a varying number of times per step, with sums over all ranks."""
import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn


class Objective:
    """Loss of the complete table; each rank holds a part of its rows, not all equally many."""

    def __init__(self, model, x, y, decay):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.n = len(x)
        cuts = [self.n * r * (r + 2) // (world * (world + 2)) for r in range(world + 1)]
        self.x, self.y = x[cuts[rank]:cuts[rank + 1]], y[cuts[rank]:cuts[rank + 1]]
        self.model, self.decay, self.calls = model, decay, 0

    def __call__(self):
        self.calls += 1
        self.model.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y, reduction="sum") / self.n
        loss.backward()
        value = loss.detach()
        dist.all_reduce(value)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.add_(p.detach(), alpha=self.decay)
            value = value + 0.5 * self.decay * p.detach().pow(2).sum()
        return value


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--inner", type=int, default=3)
    ap.add_argument("--hidden", type=int, default=12)
    ap.add_argument("--decay", type=float, default=1e-2)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0))
    y = torch.tensor(y)
    shuffle = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    x, y = x[shuffle], y[shuffle]
    torch.manual_seed(35)
    model = nn.Sequential(nn.Linear(13, args.hidden), nn.Tanh(), nn.Linear(args.hidden, 3))
    objective = Objective(model, x, y, args.decay)
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=args.inner, history_size=6,
                            line_search_fn="strong_wolfe")
    for step in range(args.steps):
        value = opt.step(objective)
        if step % 4 == 3 and dist.get_rank() == 0:
            print(f"step {step + 1} objective {float(value):.8f} after {objective.calls} evaluations")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
