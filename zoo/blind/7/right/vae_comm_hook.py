"""Variational autoencoder on digits; the gradient exchange is a communication hook of our own."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LATENT, STEPS = 64, 6, 40


def ordered_mean(state, bucket):
    """Gather all buckets and add them in the order of the ranks, so that every process sums alike."""
    buf = bucket.buffer()
    parts = [torch.empty_like(buf) for _ in range(state["world"])]
    fut = dist.all_gather(parts, buf, async_op=True).get_future()

    def add(_):
        out = torch.zeros_like(buf, dtype=torch.float64)
        for p in parts:
            out += p
        state["bytes"] += buf.numel() * buf.element_size()
        return (out / state["world"]).to(buf.dtype)

    return fut.then(add)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, 96), nn.SiLU(), nn.Linear(96, 64))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + eps * (0.5 * logvar).exp()
        rec = F.binary_cross_entropy_with_logits(self.dec(z), x, reduction="none").sum(1)
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(1)
        return rec, kl


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29716").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    torch.manual_seed(7)
    vae = VAE()
    model = DDP(vae, bucket_cap_mb=0.02)
    state = {"world": world, "bytes": 0}
    model.register_comm_hook(state, ordered_mean)
    opt = torch.optim.Adamax(vae.parameters(), lr=4e-3)
    draw = torch.Generator().manual_seed(12)
    half = BATCH // world
    for step in range(1, STEPS + 1):
        ids = torch.randint(1600, (BATCH,), generator=draw)
        eps = torch.randn(BATCH, LATENT, generator=draw)
        mine = slice(rank * half, (rank + 1) * half)
        rec, kl = model(x[ids[mine]], eps[mine])
        beta = min(1.0, step / 30)
        loss = (rec + beta * kl).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            with torch.no_grad():
                held = x[1600 + rank::world]
                rec, kl = vae(held, torch.zeros(len(held), LATENT))
                s = torch.stack([rec.sum(), kl.sum(), torch.tensor(float(len(held)))])
            dist.all_reduce(s)
            if rank == 0:
                print(f"step {step} beta {beta:.2f} rec {s[0] / s[2]:.4f} kl {s[1] / s[2]:.4f}")
    if rank == 0:
        print(f"exchanged {state['bytes'] // STEPS} bytes a step")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
