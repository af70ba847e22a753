"""Regression on a synthetic table (Friedman's function, many idle columns), FSDP, decay on matrices but not on vectors."""
import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_friedman1
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Regressor(nn.Module):
    def __init__(self, columns, width, depth):
        super().__init__()
        self.stem = nn.Linear(columns, width)
        self.body = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, x):
        return self.out(self.body(self.stem(x))).squeeze(1)


def plain(name):
    return name.replace("_fsdp_wrapped_module.", "")


def parameter_groups(model, is_matrix, decay):
    matrices, vectors = [], []
    for name, p in model.named_parameters():
        (matrices if is_matrix(plain(name), p) else vectors).append(p)
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = make_friedman1(n_samples=1536, n_features=24, noise=0.5, random_state=args.seed)
        self.x = torch.tensor(x, dtype=torch.float32) * 2 - 1
        self.y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
        torch.manual_seed(args.seed)
        net = Regressor(24, args.width, 2)
        self.model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Residual}), use_orig_params=True,
                          device_id=torch.device("cpu"))
        groups = parameter_groups(self.model, lambda n, p: p.ndim >= 2, args.decay)
        self.opt = torch.optim.AdamW(groups, lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.opt, args.lr, total_steps=args.steps)

    def batch(self, step):
        g = torch.Generator().manual_seed(1000 + step)
        rows = torch.randperm(1280, generator=g)[:self.args.batch]
        rows = rows.view(self.world, -1)[self.rank]
        return self.x[rows], self.y[rows]

    @torch.no_grad()
    def validate(self):
        rows = torch.arange(1280, 1536)[self.rank::self.world]
        error = (self.model(self.x[rows]) - self.y[rows]).square().sum()
        dist.all_reduce(error)
        return error.item() / 256

    def fit(self):
        for step in range(self.args.steps):
            x, y = self.batch(step)
            loss = nn.functional.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.model.clip_grad_norm_(1.0)
            self.opt.step()
            self.schedule.step()
            if step % 10 == 9:
                error = self.validate()
                if self.rank == 0:
                    print(f"step {step + 1}: squared error on held-out rows {error:.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--width", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--decay", type=float, default=0.3)
    ap.add_argument("--seed", type=int, default=7)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(ap.parse_args())
    trainer.fit()
    time.sleep(0.3)
    dist.destroy_process_group()
