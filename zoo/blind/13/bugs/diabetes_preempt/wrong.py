"""Diabetes progression with gradient accumulation on a machine that may be taken away at any micro-batch."""
import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.nn.parallel import DistributedDataParallel as DDP

WINDOW, PARTS, STEPS, LR = 64, 4, 30, 0.05


def load():
    bundle = load_diabetes()
    x, y = torch.tensor(bundle.data), torch.tensor(bundle.target)
    return x / x.std(dim=0), (y - y.mean()) / y.std()


def save(path, net, opt, position):
    grads = [p.grad.clone() for p in net.parameters()]
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "grads": grads, "position": position}, path)
    dist.barrier()


def job(path, x, y, taken_away_at=None):
    """Train to the end, or until the machine is taken away; goes on from `path` if it exists."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    position = 0
    if os.path.exists(path):
        state = torch.load(path)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        position = state["position"]
        for p, grad in zip(net.parameters(), state["grads"]):
            p.grad = grad
    model = DDP(net)
    size = WINDOW // (PARTS * world)

    total = torch.zeros(())
    for k in range(position, STEPS * PARTS):
        step, part = divmod(k, PARTS)
        rows = torch.randint(len(x), (WINDOW,), generator=torch.Generator().manual_seed(step))
        rows = rows[rank::world][part * size:(part + 1) * size]
        last = part == PARTS - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = ((model(x[rows]).squeeze(1) - y[rows]) ** 2).mean()
            (loss / PARTS).backward()
        total += loss.detach() / PARTS
        if last:
            opt.step()
            opt.zero_grad()
        if last and step % 5 == 4:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total / world / 5:.5f}")
            total = torch.zeros(())
        if k + 1 == taken_away_at:
            save(path, net, opt, k + 1)
            return


def main():
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "last.pt")
    x, y = load()
    job(path, x, y, taken_away_at=10 * PARTS + 3)
    job(path, x, y)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
