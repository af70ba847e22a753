import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CKPT = os.path.join("out", "denoiser.pt")
BATCH, TOTAL, HALF = 48, 36, 18


class Denoiser(nn.Module):
    """Predicts the clean digit from a noisy one; dropout in the bottleneck."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 80), nn.SiLU(), nn.Dropout(0.2), nn.Linear(80, 24))
        self.dec = nn.Sequential(nn.SiLU(), nn.Dropout(0.2), nn.Linear(24, 80), nn.SiLU(), nn.Linear(80, 64))

    def forward(self, x):
        return self.dec(self.enc(x))


def build():
    torch.manual_seed(0)
    model = DDP(Denoiser())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1000 + dist.get_rank())  # own noise and dropout on every process
    return model, opt


def save(model, opt, step):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        os.makedirs("out", exist_ok=True)
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step,
                    "rng": rng}, CKPT)
    dist.barrier()


def load(model, opt):
    ck = torch.load(CKPT, map_location="cpu")
    model.module.load_state_dict(ck["model"])
    opt.load_state_dict(ck["opt"])
    torch.set_rng_state(ck["rng"][dist.get_rank()])
    return ck["step"]


def train(model, opt, data, start, stop):
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(start, stop):
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(0, len(data), (BATCH,), generator=g)[rank::world]
        clean = data[idx]
        noisy = clean + 0.3 * torch.randn_like(clean)
        loss = (model(noisy) - clean).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % 6 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.5f}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    model, opt = build()
    train(model, opt, data, 0, HALF)
    save(model, opt, HALF)

    model, opt = build()
    start = load(model, opt)
    train(model, opt, data, start, TOTAL)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
