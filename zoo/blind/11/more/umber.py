"""Shampoo whose preconditioners are shared out: each process takes the inverse roots of some of the matrices and
sends the result to the others (Anil et al. 2020, section 4)."""
import os
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from sklearn.datasets import load_digits


def inverse_root(m, power, eps):
    lam, q = torch.linalg.eigh(m.double() + eps * torch.eye(len(m), dtype=torch.float64))
    return (q * lam.clamp_min(eps) ** (-1.0 / power) @ q.t()).to(m.dtype)


class DistributedShampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.9, eps=1e-3, update_freq=5):
        super().__init__(params, dict(lr=lr, momentum=momentum, eps=eps, update_freq=update_freq))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.count = 0

    def _factors(self):
        """all (state, side) pairs in an order that is the same on all processes"""
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() == 2:
                    for side in (0, 1):
                        yield group, self.state[p], side

    def _refresh_roots(self):
        handles = []
        for k, (group, st, side) in enumerate(self._factors()):
            owner = k % self.world
            if owner == self.rank:
                st["root"][side] = inverse_root(st["stat"][side], 4, group["eps"]).contiguous()
            handles.append(dist.broadcast(st["root"][side], src=owner, async_op=True))
        for h in handles:
            h.wait()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                st = self.state[p]
                if not st:
                    st["buf"] = torch.zeros_like(p)
                    if p.dim() == 2:
                        st["stat"] = [torch.zeros(s, s) for s in p.shape]
                        st["root"] = [torch.eye(s) for s in p.shape]
                    else:
                        st["acc"] = torch.zeros_like(p)
                if p.dim() == 2:
                    st["stat"][0] += p.grad @ p.grad.t()
                    st["stat"][1] += p.grad.t() @ p.grad
                else:
                    st["acc"] += p.grad ** 2
        if self.count % self.defaults["update_freq"] == 0:
            self._refresh_roots()
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                st = self.state[p]
                if p.dim() == 2:
                    d = st["root"][0] @ p.grad @ st["root"][1]
                    # grafting: the length of an SGD step
                    d = d * (p.grad.norm() / d.norm().clamp_min(1e-12))
                else:
                    d = p.grad / (st["acc"] + group["eps"]).sqrt() * 0.1
                st["buf"].mul_(group["momentum"]).add_(d)
                p.sub_(group["lr"] * st["buf"])


class Data:
    def __init__(self, rank, world, batch):
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=torch.float32) / 16 - 0.3, torch.tensor(y)
        self.train, self.test = (x[:1500], y[:1500]), (x[1500:], y[1500:])
        self.rank, self.world, self.batch = rank, world, batch
        self.g = torch.Generator().manual_seed(0)

    def sample(self):
        ids = torch.randint(1500, (self.batch,), generator=self.g)[self.rank::self.world]
        return self.train[0][ids], self.train[1][ids]


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30121")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))
    # gradients are averaged as they become ready
    pending = []

    def hook(p):
        p.grad /= world
        pending.append(dist.all_reduce(p.grad, async_op=True))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    opt = DistributedShampoo(net.parameters(), lr=0.3)
    data = Data(rank, world, 96)
    for step in range(1, 61):
        x, y = data.sample()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        while pending:
            pending.pop().wait()
        opt.step()
        opt.zero_grad()
        if step % 15 == 0:
            with torch.no_grad():
                out = net(data.test[0])
            if rank == 0:
                print(f"{step:3d} test loss {F.cross_entropy(out, data.test[1]):.5f} acc {(out.argmax(1) == data.test[1]).float().mean():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
