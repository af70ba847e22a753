"""Modular addition with an orthogonalising optimizer: each matrix and its momentum belong to one process.

Gradients of a matrix are reduced to its owner only; the owner steps and broadcasts the new matrix.
Embeddings, gains and biases are updated everywhere by AdamW.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PRIME, DIM, BATCH, EPOCHS = 23, 32, 80, 8


def orthogonalise(g, steps=5):
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class OwnedMuon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        every = [p for group in self.param_groups for p in group["params"]]
        load = [0] * self.world
        self.owner = {}
        for p in sorted(every, key=lambda p: -p.numel()):
            self.owner[p] = load.index(min(load))
            load[self.owner[p]] += p.numel()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if self.world > 1:
                    dist.reduce(p.grad, dst=self.owner[p])
                    if self.owner[p] != self.rank:
                        p.grad = None
            for p in group["params"]:
                if self.owner[p] == self.rank:
                    self.update(p, group)
            if self.world > 1:
                for p in group["params"]:
                    dist.broadcast(p.data, src=self.owner[p])

    def update(self, p, group):
        grad = p.grad / self.world
        buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
        buf.mul_(group["momentum"]).add_(grad)
        direction = orthogonalise(grad + group["momentum"] * buf)
        scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"] * scale)


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(PRIME, DIM)
        self.mix = nn.Linear(2 * DIM, 64)
        self.norm = nn.LayerNorm(64)
        self.hidden = nn.Linear(64, 64)
        self.out = nn.Linear(64, PRIME)

    def forward(self, pairs):
        h = F.relu(self.mix(self.embed(pairs).flatten(1)))
        h = h + F.relu(self.hidden(self.norm(h)))
        return self.out(h)


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(90)
    pairs = torch.cartesian_prod(torch.arange(PRIME), torch.arange(PRIME))
    pairs = pairs[torch.randperm(len(pairs), generator=g)]
    answer = pairs.sum(1) % PRIME
    n = 400

    torch.manual_seed(50)
    net = Adder()
    matrices = [net.mix.weight, net.hidden.weight, net.out.weight]
    others = [p for p in net.parameters() if not any(p is m for m in matrices)]
    muon = OwnedMuon(matrices, lr=0.02, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=5e-3, weight_decay=0.0)

    for epoch in range(EPOCHS):
        total = torch.zeros(1)
        for batch in torch.randperm(n, generator=g).split(BATCH):
            rows = batch.view(world, -1)[rank]
            loss = F.cross_entropy(net(pairs[rows]), answer[rows])
            muon.zero_grad()
            adam.zero_grad()
            loss.backward()
            if world > 1:
                for p in others:
                    dist.all_reduce(p.grad)
                    p.grad /= world
            muon.step()
            adam.step()
            total += loss.detach() / (n // BATCH)
        with torch.no_grad():
            mine = slice(n + rank, None, world)
            held = F.cross_entropy(net(pairs[mine]), answer[mine], reduction="sum")
        if world > 1:
            dist.all_reduce(total)
            dist.all_reduce(held)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world:.6f}  held-out {held.item() / (len(pairs) - n):.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
