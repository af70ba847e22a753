"""Regression on Friedman's first function; the model is sharded when there is more than one process."""
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import make_friedman1
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    batch: int = 64
    steps: int = 100
    lr: float = 1e-2
    hidden: int = 64
    seed: int = 42


class Regressor(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(),
        )
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = make_friedman1(n_samples=1200, n_features=10, noise=0.3, random_state=cfg.seed)
        self.x = torch.tensor(x, dtype=torch.float32)
        self.y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
        torch.manual_seed(cfg.seed)
        self.model = Regressor(10, cfg.hidden)
        if self.world > 1:
            fully_shard(self.model.body)
            fully_shard(self.model)
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=cfg.steps)
        self.gen = torch.Generator().manual_seed(cfg.seed)

    def make_optimizer(self):
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.01},
                                  {"params": rest, "weight_decay": 0.0}], lr=self.cfg.lr)

    def batch(self):
        rows = torch.randint(1000, (self.cfg.batch,), generator=self.gen)
        rows = rows.chunk(self.world)[self.rank]
        return self.x[rows], self.y[rows]

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def fit(self):
        for step in range(1, self.cfg.steps + 1):
            x, y = self.batch()
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            if step % 20 == 0:
                shown = self.mean(loss)
                if self.rank == 0:
                    print(f"step {step} mse {shown:.5f}")

    def test(self):
        with torch.no_grad():
            mse = nn.functional.mse_loss(self.model(self.x[1000:]), self.y[1000:])
        if self.rank == 0:
            print(f"test mse {mse.item():.5f}")


def main():
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29818")):
        os.environ.setdefault(key, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(Config())
    trainer.fit()
    trainer.test()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
