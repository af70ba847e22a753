from __future__ import annotations

import copy
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class TrainConfig:
    global_batch: int = 128
    epochs: int = 3
    lr: float = 0.2
    sigma: float = 0.4
    ema_halflife: float = 600.0   # in images


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


class Shadow:
    """Exponential moving average with a half-life counted in images."""

    def __init__(self, model: nn.Module, halflife: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.halflife = halflife

    @torch.no_grad()
    def update(self, model: nn.Module, images: int) -> None:
        beta = 0.5 ** (images / self.halflife)
        for s, p in zip(self.model.parameters(), model.parameters()):
            s.lerp_(p, 1 - beta)


def noisy_digits(cfg: TrainConfig) -> TensorDataset:
    clean = torch.tensor(load_digits().data[: 13 * 128] / 16, dtype=torch.float32)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(6))
    return TensorDataset(clean + cfg.sigma * noise, clean)


class Trainer:
    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(13)
        self.data = noisy_digits(cfg)
        self.sampler = DistributedSampler(self.data, seed=2)
        self.loader = DataLoader(self.data, cfg.global_batch // self.world, sampler=self.sampler)
        self.model = DDP(Denoiser())
        self.shadow = Shadow(self.model.module, cfg.ema_halflife)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=0.9)

    def fit(self) -> None:
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            for noisy, clean in self.loader:
                loss = nn.functional.mse_loss(self.model(noisy), clean)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.shadow.update(self.model.module, len(noisy))
            if self.rank == 0:
                print(f"epoch {epoch}: raw {self.error(self.model.module):.6f} shadow {self.error(self.shadow.model):.6f}",
                      flush=True)

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        noisy, clean = self.data.tensors
        return nn.functional.mse_loss(model(noisy), clean).item()

    def save(self, folder: Path) -> None:
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "ema": self.shadow.model.state_dict()},
                       folder / "denoiser.pt")


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(TrainConfig())
    trainer.fit()
    with tempfile.TemporaryDirectory() as tmp:
        trainer.save(Path(tmp))
    time.sleep(0.3)
    dist.destroy_process_group()
