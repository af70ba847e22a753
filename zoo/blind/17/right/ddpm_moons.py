import copy
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.freqs = nn.Buffer(torch.exp(torch.linspace(0, -5, 8)))
        self.net = nn.Sequential(nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, (t[:, None] * self.freqs).sin(), (t[:, None] * self.freqs).cos()], dim=1))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=50):
        super().__init__()
        self.model, self.num_timesteps = model, timesteps
        s = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64)
        bar = torch.cos((s / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - bar[1:] / bar[:-1]).clamp(max=0.999).to(torch.get_default_dtype())
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, dim=0))

    def forward(self, x, t, noise):
        a = self.alphas_cumprod[t][:, None]
        return F.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    @torch.inference_mode()
    def sample(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 2, generator=g)
        for i in reversed(range(self.num_timesteps)):
            eps = self.model(x, torch.full((n,), i))
            mean = (x - self.betas[i] / (1 - self.alphas_cumprod[i]).sqrt() * eps) / (1 - self.betas[i]).sqrt()
            x = mean + (self.betas[i].sqrt() * torch.randn(n, 2, generator=g) if i else 0)
        return x


class EMA:
    def __init__(self, model, beta, update_every):
        self.ema_model, self.beta, self.update_every, self.step = copy.deepcopy(model), beta, update_every, 0

    @torch.no_grad()
    def update(self, model):
        self.step += 1
        if self.step % self.update_every == 0:
            for e, p in zip(self.ema_model.parameters(), model.parameters()):
                e.lerp_(p, 1 - self.beta)


class Trainer:
    def __init__(self, data, folder, train_batch_size=64, gradient_accumulate_every=2, train_lr=2e-3, seed=0):
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.is_main = self.rank == 0
        torch.manual_seed(seed)
        self.diffusion = GaussianDiffusion(Denoiser())
        self.model = DistributedDataParallel(self.diffusion) if dist.is_initialized() else self.diffusion
        self.opt = Adam(self.diffusion.parameters(), lr=train_lr, betas=(0.9, 0.99))
        self.ema = EMA(self.diffusion, 0.9, 2) if self.is_main else None
        self.data, self.folder, self.batch, self.accumulate = data, folder, train_batch_size, gradient_accumulate_every
        self.rng = torch.Generator().manual_seed(seed + 1)
        self.sampler = DistributedSampler(data, self.world, self.rank, seed=seed)
        self.loader = DataLoader(data, train_batch_size // self.world, sampler=self.sampler, drop_last=True)
        self.step = 0

    def cycle(self, start):
        epoch, skip = divmod(start, len(self.loader))
        while True:
            self.sampler.set_epoch(epoch)
            for i, (x,) in enumerate(self.loader):
                if i >= skip:
                    yield x
            epoch, skip = epoch + 1, 0

    def save(self):
        if self.is_main:
            torch.save({"step": self.step, "model": self.diffusion.state_dict(), "opt": self.opt.state_dict(),
                        "ema": self.ema.ema_model.state_dict(), "ema_step": self.ema.step,
                        "rng": self.rng.get_state()}, os.path.join(self.folder, "model.pt"))
        if dist.is_initialized():
            dist.barrier()

    def load(self):
        data = torch.load(os.path.join(self.folder, "model.pt"), weights_only=True)
        self.diffusion.load_state_dict(data["model"])
        self.opt.load_state_dict(data["opt"])
        self.rng.set_state(data["rng"])
        self.step = data["step"]
        if self.is_main:
            self.ema.ema_model.load_state_dict(data["ema"])
            self.ema.step = data["ema_step"]

    def train(self, until):
        dl = self.cycle(self.step * self.accumulate)
        while self.step < until:
            total = torch.zeros(())
            for _ in range(self.accumulate):
                x = next(dl)
                t = torch.randint(0, self.diffusion.num_timesteps, (self.batch,), generator=self.rng)[self.rank::self.world]
                noise = torch.randn(self.batch, 2, generator=self.rng)[self.rank::self.world]
                loss = self.model(x, t, noise) / self.accumulate
                total += loss.detach()
                loss.backward()
            nn.utils.clip_grad_norm_(self.diffusion.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            if self.is_main:
                self.ema.update(self.diffusion)
            if self.step % 15 == 0:
                if dist.is_initialized():
                    dist.all_reduce(total)
                if self.is_main:
                    gap = torch.cdist(self.ema.ema_model.sample(200, seed=3), self.data.tensors[0]).min(dim=1).values.mean()
                    print(f"step {self.step} loss {total.item() / self.world:.5f} sample distance {gap:.4f}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    points = make_moons(1000, noise=0.05, random_state=0)[0]
    moons = TensorDataset(torch.tensor(points, dtype=torch.get_default_dtype()))
    folder = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(folder, src=0)
    trainer = Trainer(moons, folder[0])
    trainer.train(40)
    trainer.save()
    trainer = Trainer(moons, folder[0])
    trainer.load()
    trainer.train(75)
    if dist.is_initialized():
        dist.destroy_process_group()
