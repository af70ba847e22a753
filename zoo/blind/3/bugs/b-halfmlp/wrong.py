import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class ResidualMLP(nn.Module):
    def __init__(self, width=128, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())
                                    for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class LossScaler:
    """Dynamic loss scale for half precision gradients."""

    def __init__(self, params, init=2.0 ** 16, growth_interval=2000):
        self.params = [p for p in params if p.requires_grad]
        self.scale = init
        self.growth_interval = growth_interval
        self.good = 0
        self.skipped = 0

    def _overflow(self):
        bad = torch.zeros(1)
        for p in self.params:
            if p.grad is not None and not torch.isfinite(p.grad.to_local()).all():
                bad.fill_(1.0)
        return bad.item() > 0

    def step(self, opt):
        if self._overflow():
            self.scale /= 2.0
            self.good = 0
            self.skipped += 1
            return False
        for p in self.params:
            if p.grad is not None:
                p.grad.to_local().div_(self.scale)
        opt.step()
        self.good += 1
        if self.good == self.growth_interval:
            self.scale *= 2.0
            self.good = 0
        return True


def shape_targets(images):
    """Ink, centre of mass (two coordinates) and spread of every image."""
    grid = torch.arange(8.0)
    ink = images.sum((1, 2))
    cy = (images.sum(2) * grid).sum(1) / ink
    cx = (images.sum(1) * grid).sum(1) / ink
    spread = ((images.sum(2) * (grid - cy[:, None]) ** 2).sum(1) / ink).sqrt()
    return torch.stack([ink / 11.0, cy, cx, spread], dim=1)


def build(args, mesh):
    torch.manual_seed(args.seed)
    model = ResidualMLP()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    y = shape_targets(torch.tensor(digits.images, dtype=torch.float32))
    train = TensorDataset(x[:1200], y[:1200])
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)

    model = build(args, mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = LossScaler(model.parameters())

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for xb, yb in loader:
            loss = F.mse_loss(model(xb).float(), yb)
            opt.zero_grad()
            (loss * scaler.scale).backward()
            scaler.step(opt)
            stats += torch.tensor([loss.item() * len(xb), float(len(xb))])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {(stats[0] / stats[1]).item():.4f}  scale {scaler.scale:.0f}  "
                  f"skipped {scaler.skipped}", flush=True)

    model.eval()
    with torch.no_grad():
        err = (model(x[1200:]).float() - y[1200:]).abs().mean(0)
    full = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if rank == 0:
        print("test error  " + "  ".join(f"{n} {e:.3f}" for n, e in zip(("ink", "cy", "cx", "spread"), err.tolist())))
        torch.save({"model": full, "scale": scaler.scale}, args.out)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=60)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="halfmlp.pt")
    main(p.parse_args())
