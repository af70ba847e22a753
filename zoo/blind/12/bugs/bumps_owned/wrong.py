"""Function fitting; moments of Adam are kept by the owner of a parameter (ZeRO, stage 1). Two jobs, one file."""
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn


class OwnedAdam:
    def __init__(self, named, lr, betas=(0.9, 0.98)):
        self.named, self.lr, self.betas = list(named), lr, betas
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.moments = {n: [torch.zeros_like(p), torch.zeros_like(p)] for n, p in self.own()}
        self.t = 0

    def own(self):
        return self.named[self.rank::self.world]

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for _, p in self.named:
            dist.all_reduce(p.grad)
            p.grad /= self.world
        for n, p in self.own():
            m, v = self.moments[n]
            m.lerp_(p.grad, 1 - b1)
            v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            denom = (v / (1 - b2 ** self.t)).sqrt() + 1e-8
            p.sub_(self.lr * m / (1 - b1 ** self.t) / denom)
        for i, (_, p) in enumerate(self.named):
            dist.broadcast(p, src=i % self.world)

    def state(self):
        return {"t": self.t, "moments": self.moments}

    def load(self, state):
        self.t = state["t"]
        for n in self.moments:
            for mine, saved in zip(self.moments[n], state["moments"].get(n, [])):
                mine.copy_(saved)


def data():
    g = torch.Generator().manual_seed(50)
    x = torch.rand(960, 2, generator=g) * 4 - 2
    y = torch.exp(-(x ** 2).sum(1)) + 0.5 * torch.sin(math.pi * x[:, 0])
    return x, y


def job(path, epochs, resume):
    torch.manual_seed(30)
    net = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 1))
    opt = OwnedAdam(net.named_parameters(), lr=5e-3)
    if resume:
        file = torch.load(path)
        net.load_state_dict(file["net"])
        opt.load(file["opt"])
    x, y = data()
    for epoch in epochs:
        total = torch.zeros(())
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(96):
            rows = rows[opt.rank::opt.world]
            net.zero_grad()
            loss = ((net(x[rows]).squeeze(1) - y[rows]) ** 2).mean()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if opt.rank == 0:
            print(f"epoch {epoch} {total.item() / opt.world / 10:.7f}")
    state = opt.state()
    if opt.rank == 0:
        torch.save({"net": net.state_dict(), "opt": state}, path)
    dist.barrier()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = [os.path.join(tempfile.mkdtemp(), "job.pt") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    job(name[0], range(0, 3), resume=False)
    job(name[0], range(3, 6), resume=True)
    time.sleep(0.3)
    dist.destroy_process_group()
