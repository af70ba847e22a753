"""K-FAC on digits: factors are averaged over ranks, each layer is inverted by its owner and sent round."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Dist:
    on = "RANK" in os.environ
    rank, world = 0, 1

    @classmethod
    def start(cls):
        if cls.on:
            dist.init_process_group("gloo")
            cls.rank, cls.world = dist.get_rank(), dist.get_world_size()

    @classmethod
    def mean(cls, tensors):
        if cls.on:
            works = [dist.all_reduce(t, async_op=True) for t in tensors]
            for t, w in zip(tensors, works):
                w.wait()
                t.div_(cls.world)

    @classmethod
    def send_round(cls, tensors, src):
        if cls.on:
            for t in tensors:
                dist.broadcast(t, src=src)

    @classmethod
    def stop(cls):
        if cls.on:
            dist.destroy_process_group()


class KFAC:
    def __init__(self, model, damping=0.02, decay=0.9, every=4, kl_clip=2e-3):
        self.damping, self.decay, self.every, self.kl_clip = damping, decay, every, kl_clip
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        sizes = [m.weight.shape for m in self.layers]
        cost = {k: o ** 3 + (i + 1) ** 3 for k, (o, i) in enumerate(sizes)}
        self.owner, load = {}, [0] * Dist.world
        for k in sorted(cost, key=cost.get, reverse=True):
            self.owner[k] = load.index(min(load))
            load[self.owner[k]] += cost[k]
        self.A = [torch.eye(i + 1) for _, i in sizes]
        self.G = [torch.eye(o) for o, _ in sizes]
        self.A_inv = [torch.empty_like(a) for a in self.A]
        self.G_inv = [torch.empty_like(g) for g in self.G]
        self.seen_a, self.seen_g, self.steps = {}, {}, 0
        for k, m in enumerate(self.layers):
            m.register_forward_hook(self.forward_hook(k))

    def forward_hook(self, k):
        def hook(module, args, out):
            if not torch.is_grad_enabled():
                return
            a = args[0].detach()
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            self.seen_a[k] = a.T @ a / len(a)

            def backward(grad):
                per_sample = grad.detach() * len(grad)  # undo the mean of the loss
                self.seen_g[k] = per_sample.T @ per_sample / len(grad)

            out.register_hook(backward)
        return hook

    def refresh(self):
        names = range(len(self.layers))
        Dist.mean([self.seen_a[k] for k in names] + [self.seen_g[k] for k in names])
        for k in names:
            self.A[k].lerp_(self.seen_a[k], 1 - self.decay)
            self.G[k].lerp_(self.seen_g[k], 1 - self.decay)
            if self.owner[k] == Dist.rank:
                a, g = self.A[k], self.G[k]
                pi = ((a.trace() / len(a)) / (g.trace() / len(g)).clamp(min=1e-12)).sqrt()
                root = self.damping ** 0.5
                self.A_inv[k].copy_(torch.linalg.inv(a + pi * root * torch.eye(len(a))))
                self.G_inv[k].copy_(torch.linalg.inv(g + root / pi * torch.eye(len(g))))
        for k in names:
            Dist.send_round([self.A_inv[k], self.G_inv[k]], self.owner[k])

    @torch.no_grad()
    def precondition(self, lr):
        if self.steps % self.every == 0:
            self.refresh()
        self.steps += 1
        directions, size = [], 0.0
        for k, m in enumerate(self.layers):
            grad = torch.cat([m.weight.grad, m.bias.grad[:, None]], 1)
            d = self.G_inv[k] @ grad @ self.A_inv[k]
            size += (d * grad).sum() * lr ** 2
            directions.append(d)
        nu = (self.kl_clip / size).sqrt().clamp(max=1.0)
        for m, d in zip(self.layers, directions):
            m.weight.grad.copy_(nu * d[:, :-1])
            m.bias.grad.copy_(nu * d[:, -1])
        return nu.item()


def main():
    torch.set_default_dtype(torch.float64)
    Dist.start()
    torch.manual_seed(6)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 10))
    kfac, lr = KFAC(model), 0.1
    optim = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    test_x, test_y = x[1400:], y[1400:]

    for epoch in range(2):
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(100):
            mine = ids.view(Dist.world, -1)[Dist.rank]
            loss = F.cross_entropy(model(x[mine]), y[mine])
            optim.zero_grad()
            loss.backward()
            Dist.mean([p.grad for p in model.parameters()])
            nu = kfac.precondition(lr)
            optim.step()
        with torch.no_grad():
            part = torch.arange(len(test_x)).tensor_split(Dist.world)[Dist.rank]
            logits = model(test_x[part])
            res = torch.stack([F.cross_entropy(logits, test_y[part], reduction="sum"),
                               (logits.argmax(1) == test_y[part]).sum().double()])
            if Dist.on:
                dist.all_reduce(res)
            nll, acc = (res / len(test_x)).tolist()
        if Dist.rank == 0:
            print(f"epoch {epoch} test nll {nll:.10f} acc {acc:.6f} nu {nu:.10f}")
    Dist.stop()


if __name__ == "__main__":
    main()
