"""Each rank takes its own step, then the weights and the velocities are averaged; no gradient is ever sent."""
import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn


def average(tensors):
    flat = torch._utils._flatten_dense_tensors(tensors)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for t, v in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors)):
        t.copy_(v)


class AveragedSGD(torch.optim.SGD):
    """Every term of this rule is linear in the gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        out = super().step(closure)
        everything = [p.data for group in self.param_groups for p in group["params"]]
        everything += [s["momentum_buffer"] for s in self.state.values() if s.get("momentum_buffer") is not None]
        average(everything)
        return out


def hinge(scores, y):
    truth = scores.gather(1, y[:, None])
    margin = (1 + scores - truth).clamp(min=0)
    return margin.sum(1).mean() - 1


def shuffled(n, batch, seed, rank, world):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for chunk in order.split(batch):
        yield chunk.tensor_split(world)[rank]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--momentum", type=float, default=0.85)
    parser.add_argument("--decay", type=float, default=5e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(90)
    net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.CELU(), nn.Flatten(),
                        nn.Linear(288, 32), nn.CELU(), nn.Linear(32, 10))
    opt = AveragedSGD(net.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.decay)
    batches = partial(shuffled, 1500, args.batch, rank=rank, world=world)
    for epoch in range(args.epochs):
        for rows in batches(seed=epoch):
            opt.zero_grad()
            loss = hinge(net(x[rows]), y[rows])
            loss.backward()
            opt.step()
        with torch.no_grad():
            test = hinge(net(x[1500:]), y[1500:]).item()
        if rank == 0:
            print(f"epoch {epoch}: test hinge {test:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()
