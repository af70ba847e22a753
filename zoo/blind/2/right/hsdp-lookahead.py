import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha, self.n = inner, k, alpha, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.n += 1
        if self.n % self.k == 0:
            for g, slow in zip(self.param_groups, self.slow):
                for p, s in zip(g["params"], slow):
                    s.lerp_(p, self.alpha)
                    p.copy_(s)


class Mixer(nn.Module):
    def __init__(self, tokens, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.tok = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.chan = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chan(self.n2(x))


class MixerNet(nn.Module):
    def __init__(self, d=32, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 2, 2)
        self.blocks = nn.Sequential(*[Mixer(16, d) for _ in range(depth)])
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--shard", type=int, default=1, help="processes that share one copy of the weights")
    ap.add_argument("--batch", type=int, default=25)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // args.shard, args.shard), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(8)
    model = MixerNet()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = Lookahead(torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01), k=4)
    if rank == 0:
        w = model.head.weight
        print(mesh, "head:", tuple(w.shape), "local:", tuple(w.to_local().shape), w.placements)

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    train = TensorDataset(x[:750], y[:750])
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(2, dtype=torch.float64)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            running += torch.tensor([loss.item() * len(xb), len(xb)])
        dist.all_reduce(running)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        model.eval()
        pred = torch.full((len(x) - 750,), -1)
        with torch.no_grad():
            n = (len(pred) + world - 1) // world
            lo = rank * n
            pred[lo:lo + n] = model(x[750 + lo:750 + lo + n]).argmax(1)
        dist.all_reduce(pred, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"epoch {epoch} loss {running[0] / running[1]:.4f} norm {norm.item():.3f} test acc {(pred == y[750:]).float().mean():.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    time.sleep(0.3)
    dist.destroy_process_group()
