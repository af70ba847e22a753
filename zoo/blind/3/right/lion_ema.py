import copy
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


@dataclass
class Config:
    epochs: int = 3
    batch_per_rank: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.05
    ema: float = 0.95
    seed: int = 4


class Lion(optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m * b1 + p.grad * (1 - b1)), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Ema:
    def __init__(self, model, decay):
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 12, 3, padding=1)
        self.c2 = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.f1 = nn.Linear(24 * 16, 64)
        self.f2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.c2(F.relu(self.c1(x))))
        return self.f2(F.relu(self.f1(x.flatten(1))))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        bunch = load_digits()
        x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
        y = torch.tensor(bunch.target)
        self.train_set = TensorDataset(x[:1408], y[:1408])
        self.sampler = DistributedSampler(self.train_set, seed=cfg.seed)
        self.loader = DataLoader(self.train_set, cfg.batch_per_rank, sampler=self.sampler)
        # only the first process holds the test split
        self.test = (x[1408:], y[1408:]) if self.rank == 0 else None
        torch.manual_seed(cfg.seed)
        self.model = DistributedDataParallel(ConvNet())
        self.ema = Ema(self.model.module, cfg.ema)
        self.opt = Lion(self.model.parameters(), cfg.lr, weight_decay=cfg.weight_decay)
        self.plateau = optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.3, patience=0, threshold=0.2)

    def epoch(self, n):
        self.sampler.set_epoch(n)
        for x, y in self.loader:
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.ema.update(self.model.module)
        return loss.item()

    def validate(self):
        result = torch.zeros(2)
        if self.rank == 0:
            x, y = self.test
            with torch.no_grad():
                out = self.ema.shadow(x)
            result[0] = F.cross_entropy(out, y)
            result[1] = (out.argmax(1) == y).float().mean()
        dist.broadcast(result, src=0)
        return result.tolist()

    def fit(self):
        best = float("inf")
        for n in range(self.cfg.epochs):
            last = self.epoch(n)
            vloss, vacc = self.validate()
            self.plateau.step(vloss)
            if self.rank == 0:
                print(f"{n}: last {last:.4f} | ema val {vloss:.4f} acc {vacc:.4f} | lr {self.opt.param_groups[0]['lr']:.2e}")
                if vloss < best:
                    best = vloss
                    torch.save(self.ema.shadow.state_dict(), "/tmp/lion_ema_best.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    trainer.fit()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
