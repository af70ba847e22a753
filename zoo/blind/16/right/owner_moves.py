"""Muon with the orthogonalisation shared out: each matrix has an owner, who sends the result round.

Vectors, the input layer and the readout use AdamW on every rank.
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EPOCHS, WIDTH = 48, 5, 32


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            pending = []
            for i, p in enumerate(group["params"]):
                owner = i % self.world
                if owner == self.rank:
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    buf = state["momentum"]
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    update = newton_schulz(p.grad.lerp(buf, group["momentum"]))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"])
                if self.world > 1:
                    pending.append(dist.broadcast(p.data, owner, async_op=True))
            for work in pending:
                work.wait()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.gelu(self.mix(self.norm(x)))


def main():
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    many = dist.is_initialized()
    rank = dist.get_rank() if many else 0
    world = dist.get_world_size() if many else 1
    torch.set_default_dtype(torch.float64)

    data = load_diabetes()
    x, y = torch.tensor(data.data) * 20, torch.tensor(data.target)
    y = (y - y[:384].mean()) / y[:384].std()

    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(10, WIDTH), *[Block(WIDTH) for _ in range(5)], nn.Linear(WIDTH, 1))
    model = DDP(net) if many else net
    hidden = [b.mix.weight for b in net if isinstance(b, Block)]
    ids = {id(p) for p in hidden}
    others = [p for p in net.parameters() if id(p) not in ids]
    muon = Muon(hidden)
    adam = torch.optim.AdamW(others, lr=4e-3, weight_decay=0.01)

    for epoch in range(EPOCHS):
        order = torch.randperm(384, generator=torch.Generator().manual_seed(epoch))
        seen = torch.zeros(())
        for batch in order.view(-1, BATCH):
            part = batch[rank::world]
            muon.zero_grad()
            adam.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(x[part]).squeeze(1), y[part])
            loss.backward()
            muon.step()
            adam.step()
            seen += loss.detach() * len(part)
        if many:
            dist.all_reduce(seen)
        for opt, start in ((muon, 0.02), (adam, 4e-3)):
            for group in opt.param_groups:
                group["lr"] = start * (1 - (epoch + 1) / (EPOCHS + 1))
        if rank == 0:
            with torch.no_grad():
                test = nn.functional.mse_loss(net(x[384:]).squeeze(1), y[384:])
            print(f"epoch {epoch}: train {seen / 384:.8f} test {test:.8f}")

    if many:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
