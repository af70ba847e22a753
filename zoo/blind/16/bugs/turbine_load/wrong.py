"""Load on wind turbine blades: optimizer state split over the processes, learning rate found from the distance travelled."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


class Cluster:
    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group("gloo")

    def sum(self, x):
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x):
        if self.world == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x)
        return torch.cat(parts)


class ShardedProdigy:
    """Each process keeps the moments of one piece of the flat parameter vector."""

    def __init__(self, params, cluster, lr=1.0, betas=(0.9, 0.99), d0=1e-3):
        self.params, self.cluster = list(params), cluster
        self.lr, self.betas, self.d, self.numerator = lr, betas, d0, 0.0
        self.total = sum(p.numel() for p in self.params)
        self.piece = -(-self.total // cluster.world)
        self.x = self.local(self.flat(self.params))
        self.x0 = self.x.clone()
        self.m, self.v, self.s = (torch.zeros_like(self.x) for _ in range(3))

    def flat(self, tensors):
        flat = torch.cat([t.detach().flatten() for t in tensors])
        return F.pad(flat, (0, self.piece * self.cluster.world - self.total))

    def local(self, flat):
        return flat[self.cluster.rank * self.piece:(self.cluster.rank + 1) * self.piece].clone()

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        flat = self.cluster.sum(self.flat([p.grad for p in self.params])) / self.cluster.world
        g, d, (b1, b2) = self.local(flat), self.d, self.betas
        keep = b2**0.5
        self.m.mul_(b1).add_(g, alpha=(1 - b1) * d)
        self.v.mul_(b2).addcmul_(g, g, value=(1 - b2) * d * d)
        self.s.mul_(keep).add_(g, alpha=(1 - keep) * d * d)
        travelled = torch.stack([g @ (self.x0 - self.x), self.s.abs().sum()])
        dot, size = travelled.tolist()
        self.numerator = keep * self.numerator + (1 - keep) * d * d * dot
        self.x.addcdiv_(self.m, self.v.sqrt() + d * 1e-8, value=-self.lr * d)
        self.d = max(d, self.numerator / size)
        whole = self.cluster.gather(self.x)[:self.total]
        for p, piece in zip(self.params, whole.split([p.numel() for p in self.params])):
            p.copy_(piece.view_as(p))


class LoadNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 2))


def measurements(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 5, generator=g) * 2 - 1
    wind, pitch, yaw, gust, speed = x.T
    bend = (1 + wind) ** 2 * torch.cos(pitch) + 0.5 * gust * yaw
    twist = torch.sin(2 * pitch + yaw) * (1 + speed)
    return x, torch.stack([bend, twist], 1) + 0.05 * torch.randn(n, 2, generator=g)


def main():
    cluster = Cluster()
    torch.manual_seed(77)
    net = LoadNet()
    opt = ShardedProdigy(net.parameters(), cluster)
    x, y = measurements(960, 1)
    order = torch.Generator().manual_seed(12)
    for epoch in range(6):
        total = torch.zeros(())
        for batch in torch.randperm(len(x), generator=order).view(-1, 48):
            mine = batch[cluster.rank::cluster.world]
            loss = F.mse_loss(net(x[mine]), y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(mine)
        total = cluster.sum(total)
        if cluster.rank == 0:
            print(f"epoch {epoch} mse {total / len(x):.8f} d {opt.d:.6e}")
    if cluster.rank == 0:
        xt, yt = measurements(300, 2)
        with torch.no_grad():
            print(f"held out {F.mse_loss(net(xt), yt):.8f}")
    if cluster.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
