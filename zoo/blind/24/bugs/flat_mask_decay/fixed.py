"""Every process owns a slice of one flat buffer of weights and keeps the optimizer state for it."""
import argparse, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from sklearn.datasets import load_iris


class FlatMomentum:
    """SGD with momentum and decoupled weight decay over a flat, evenly cut buffer."""

    def __init__(self, module, lr, momentum=0.9, decay=0.5):
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = list(module.parameters())
        numel = sum(p.numel() for p in self.params)
        self.shard = -(-numel // self.world)
        self.pad = self.shard * self.world - numel
        # biases and gains are not decayed
        mask = self.flatten([torch.full_like(p, float(p.dim() > 1)) for p in self.params])
        self.mask = mask[self.rank * self.shard:(self.rank + 1) * self.shard]
        self.velocity = torch.zeros(self.shard)

    def flatten(self, tensors):
        return F.pad(torch.cat([t.detach().reshape(-1) for t in tensors]), (0, self.pad))

    @torch.no_grad()
    def step(self):
        grad = self.flatten([p.grad for p in self.params])
        mine = torch.empty(self.shard)
        dist.reduce_scatter_tensor(mine, grad)
        mine /= self.world
        weights = self.flatten(self.params)
        w = weights[self.rank * self.shard:(self.rank + 1) * self.shard].clone()
        self.velocity.mul_(self.momentum).add_(mine)
        w -= self.lr * (self.velocity + self.decay * self.mask * w)
        dist.all_gather_into_tensor(weights, w)
        at = 0
        for p in self.params:
            p.copy_(weights[at:at + p.numel()].view_as(p))
            p.grad = None
            at += p.numel()


class IrisNet(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.a = nn.Linear(4, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.b = nn.Linear(hidden, hidden)
        self.c = nn.Linear(hidden, 3)

    def forward(self, x):
        return self.c(F.gelu(self.b(self.norm(F.gelu(self.a(x))))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", default=30, type=int)
    parser.add_argument("--steps", default=50, type=int)
    parser.add_argument("--batch", default=48, type=int)
    opts = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29701"}
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_iris(return_X_y=True)
    x, y = torch.tensor(x - x.mean(0)).float(), torch.tensor(y)
    torch.manual_seed(3)
    net = IrisNet(opts.hidden)
    optimizer = FlatMomentum(net, lr=0.02)
    rng = torch.Generator().manual_seed(33)
    for step in range(opts.steps):
        ids = torch.randperm(len(x), generator=rng)[:opts.batch][rank::world]
        loss = F.cross_entropy(net(x[ids]), y[ids])
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0 and rank == 0:
            with torch.no_grad():
                print(f"{step + 1:4d} {F.cross_entropy(net(x), y).item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
