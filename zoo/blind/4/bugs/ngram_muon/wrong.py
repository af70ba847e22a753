"""Neural n-gram model of Python source, FSDP2, matrices trained with orthogonalised momentum."""
import argparse
import statistics
import heapq
import inspect
import time

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONTEXT = 8


def orthogonalise(g, rounds=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buf"] = torch.zeros_like(p.grad)
                buf = state["buf"]
                buf.mul_(group["momentum"]).add_(p.grad)
                look = p.grad.add(buf, alpha=group["momentum"])
                update = self.direction(look)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)

    @staticmethod
    def direction(look):
        local = orthogonalise(look.to_local())
        return dt.DTensor.from_local(local, look.device_mesh, look.placements, shape=look.shape, stride=look.stride())


class NGram(nn.Module):
    def __init__(self, dim=24, hidden=64):
        super().__init__()
        self.table = nn.Embedding(128, dim)
        self.fc1 = nn.Linear(CONTEXT * dim, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, 128)

    def forward(self, ids):
        h = F.silu(self.fc1(self.table(ids).flatten(1)))
        h = h + F.silu(self.fc2(self.norm(h)))
        return self.out(h)


def corpus():
    text = "".join(inspect.getsource(m) for m in (statistics, heapq))
    return torch.tensor([min(ord(c), 127) for c in text])


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(args.seed)
    model = NGram()
    fully_shard(model.fc2, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [model.fc1.weight, model.fc2.weight]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [Muon(matrices, lr=0.02, weight_decay=0.01), torch.optim.Adam(rest, lr=4e-3)]

    ids = corpus()
    gen = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        starts = torch.randint(0, len(ids) - CONTEXT - 1, (args.batch,), generator=gen)
        starts = starts.chunk(world)[rank]
        window = torch.stack([ids[s:s + CONTEXT + 1] for s in starts.tolist()])
        loss = F.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step:3d} loss {shown.item() / world:.4f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=21)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = train(parser.parse_args())
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
