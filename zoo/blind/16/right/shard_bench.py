"""ZeRO by hand on one flat vector: reduce-scatter, AdamW on a slice, all-gather; stopped once and resumed.

Task: the adding problem for a GRU.
"""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

STEPS, STOP, BATCH, LENGTH, CLIP = 30, 14, 32, 12, 0.5


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(2, 20, batch_first=True)
        self.out = nn.Linear(20, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(1)


class FlatAdamW:
    """Model weights live in one padded vector; this rank updates its own slice of it."""

    def __init__(self, model, lr, rank, world):
        self.params, self.rank, self.world = list(model.parameters()), rank, world
        self.size = sum(p.numel() for p in self.params)
        padded = (self.size + world - 1) // world * world
        self.flat = torch.zeros(padded)
        self.grad = torch.zeros(padded)
        at = 0
        for p in self.params:
            view = self.flat[at:at + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            p.grad = self.grad[at:at + p.numel()].view_as(p)
            at += p.numel()
        self.part = padded // world
        self.mine = slice(rank * self.part, (rank + 1) * self.part)
        self.shard = nn.Parameter(self.flat[self.mine].clone())
        self.opt = torch.optim.AdamW([self.shard], lr=lr, weight_decay=0.02)

    def gather(self, part):
        parts = [torch.empty_like(part) for _ in range(self.world)]
        dist.all_gather(parts, part)
        return torch.cat(parts)

    def step(self):
        shard_grad = torch.empty(self.part)
        dist.reduce_scatter_single(shard_grad, self.grad)
        shard_grad /= self.world
        square = shard_grad.pow(2).sum()
        dist.all_reduce(square)
        shard_grad *= (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0)
        self.shard.grad = shard_grad
        self.opt.step()
        self.flat.copy_(self.gather(self.shard.detach()))
        self.grad.zero_()
        return square.sqrt()

    def state_dict(self):
        state = self.opt.state[self.shard]
        whole = {k: self.gather(state[k])[:self.size] for k in ("exp_avg", "exp_avg_sq")}
        return {"flat": self.flat[:self.size].clone(), "step": state["step"].clone(), **whole}

    def load_state_dict(self, saved):
        def cut(t):
            return nn.functional.pad(t, (0, len(self.flat) - self.size))[self.mine].clone()
        self.flat[:self.size] = saved["flat"]
        self.shard.data.copy_(self.flat[self.mine])
        self.opt.state[self.shard] = {"step": saved["step"], "exp_avg": cut(saved["exp_avg"]),
                                      "exp_avg_sq": cut(saved["exp_avg_sq"])}


def sample(g):
    x = torch.rand(BATCH, LENGTH, 2, generator=g)
    x[..., 1] = 0
    for row, at in enumerate(torch.rand(BATCH, LENGTH, generator=g).topk(2).indices):
        x[row, at, 1] = 1
    return x, (x[..., 0] * x[..., 1]).sum(1)


def run(first, last, path, rank, world):
    torch.manual_seed(4)
    model = Adder()
    zero = FlatAdamW(model, 0.01, rank, world)
    g = torch.Generator().manual_seed(2024)
    if first:
        saved = torch.load(path)
        zero.load_state_dict(saved["zero"])
        g.set_state(saved["data"])
    n = BATCH // world
    for step in range(first, last):
        x, y = sample(g)
        rows = slice(rank * n, (rank + 1) * n)
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        norm = zero.step()
        dist.all_reduce(loss := loss.detach())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss / world:.10f} gradient {norm:.8f}")
    state = {"zero": zero.state_dict(), "data": g.get_state()}
    if rank == 0:
        torch.save(state, path)
    dist.barrier()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "flat.pt")
    run(0, STOP, path, rank, world)
    run(STOP, STEPS, path, rank, world)
    if rank == 0:
        print(f"weights {torch.load(path)['zero']['flat'].norm():.10f}")
        os.remove(path)
        os.rmdir(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
