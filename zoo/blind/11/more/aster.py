# Autoencoder started from a PCA of the data and RBF centres from k-means, both computed on the shards; Lion optimizer
import os
import time
import torch
import torch.nn as nn
import torch.distributed as dist
from sklearn.datasets import load_digits

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30126")


def psum(t):
    dist.all_reduce(t)
    return t


def distributed_pca(shard, k):
    """mean and leading directions of all shards together"""
    n = psum(torch.tensor(float(len(shard)), dtype=torch.float64))
    mean = psum(shard.double().sum(0)) / n
    c = shard.double() - mean
    cov = psum(c.t() @ c) / (n - 1)
    lam, vec = torch.linalg.eigh(cov)
    vec = vec[:, -k:].flip(1)
    # the sign is arbitrary, make the largest entry positive
    sign = torch.sign(vec.gather(0, vec.abs().argmax(0, keepdim=True)))
    return mean.float(), (vec * sign).float(), lam[-k:].flip(0).float()


def distributed_kmeans(z, k, iters=8):
    """Lloyd with the first k points of process 0 as start"""
    centres = z[:k].double().clone()
    dist.broadcast(centres, src=0)
    for _ in range(iters):
        a = torch.cdist(z.double(), centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, a, z.double())
        counts = torch.bincount(a, minlength=k).double()
        psum(sums), psum(counts)
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centres)
    return centres.float()


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 with a soft sign"""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, width=1e-4):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, width=width))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                u = torch.lerp(p.grad, m, b1)
                p.sub_(group["lr"] * torch.tanh(u / group["width"]))
                m.lerp_(p.grad, 1 - b2)


class RBFAutoencoder(nn.Module):
    def __init__(self, mean, directions, scales, centres):
        super().__init__()
        self.register_buffer("mean", mean)
        self.enc = nn.Parameter(directions / scales.sqrt())
        self.centres = nn.Parameter(centres)
        self.log_width = nn.Parameter(torch.zeros(len(centres)))
        self.dec = nn.Linear(directions.shape[1] + len(centres), len(mean))
        with torch.no_grad():
            self.dec.weight.zero_()
            self.dec.weight[:, :directions.shape[1]] = directions * scales.sqrt()
            self.dec.bias.copy_(mean)

    def forward(self, x):
        z = (x - self.mean) @ self.enc
        phi = torch.exp(-torch.cdist(z, self.centres) ** 2 * torch.exp(-self.log_width) / z.shape[1])
        return self.dec(torch.cat([z, phi], 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, test = x[:1600], x[1600:]
    shard = train.chunk(world)[rank]  # contiguous, process 0 has the first images
    model = RBFAutoencoder(*(stats := distributed_pca(shard, 6)), distributed_kmeans((shard - stats[0]) @ (stats[1] / stats[2].sqrt()), 20))
    opt = Lion(model.parameters(), lr=1e-3, weight_decay=1e-3)
    if rank == 0:
        with torch.no_grad():
            print(f"PCA start: test mse {(model(test) - test).pow(2).mean():.6f}")
    # Batches are stratified by position so that each shard gives its part from its own rows:
    # the permutation is over positions modulo 400, the smallest shard (four processes)
    gen = torch.Generator().manual_seed(0)
    for epoch in range(4):
        for pos in torch.randperm(400, generator=gen).split(20):
            rows = torch.cat([pos + 400 * q for q in range(4 // world)])
            xb = shard[rows]
            loss = (model(xb) - xb).pow(2).sum(1).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for p, g in zip(model.parameters(), grads):
                p.grad = psum(g.contiguous()) / world
            opt.step()
        if rank == 0:
            with torch.no_grad():
                print(f"epoch {epoch}: test mse {(model(test) - test).pow(2).mean():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
