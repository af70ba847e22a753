"""VAE on digits. Runs under torchrun, or on its own: python vae_spawn.py --nprocs 2"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self, latent=8, hidden=96):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x, noise=None):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        eps = torch.randn_like(mu) if noise is None else noise
        return self.dec(mu + eps * (0.5 * logvar).exp()), mu, logvar


def elbo(logits, x, mu, logvar, beta):
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return (rec + beta * kl).mean(), rec.mean().detach(), kl.mean().detach()


def worker(local_rank, args, world=None, port=None):
    torch.set_num_threads(1)
    if world is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(local_rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, test = TensorDataset(x[:1440]), x[1440:]
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = DDP(VAE())
    # linear rule: the rate belongs to 32 samples per update
    lr = args.base_lr * args.batch_size * world / 32
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=len(loader) // 2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs * len(loader) - len(loader) // 2)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, decay], milestones=[len(loader) // 2])
    torch.manual_seed(args.seed + 10_000 * (rank + 1))

    step, total = 0, args.epochs * len(loader)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3)
        for (b,) in loader:
            beta = min(1.0, 2 * (step + 1) / total)
            logits, mu, logvar = model(b)
            loss, rec, kl = elbo(logits, b, mu, logvar, beta)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            step += 1
            sums += torch.stack([rec, kl, torch.ones(())])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} rec {sums[0] / sums[2]:.3f} kl {sums[1] / sums[2]:.3f} lr {sched.get_last_lr()[0]:.5f} (peak {lr:.5f})")

    with torch.no_grad():
        part = test[rank::world]
        logits, _, _ = model.module(part, noise=torch.zeros(len(part), 8))
        err = torch.stack([F.binary_cross_entropy_with_logits(logits, part, reduction="sum").double(), torch.tensor(len(part)).double()])
    dist.all_reduce(err)
    if rank == 0:
        print(f"test reconstruction {err[0] / err[1]:.4f} nats over {int(err[1])} images")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--nprocs", type=int, default=2)
    ap.add_argument("--port", type=int, default=29611)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=36)
    ap.add_argument("--base-lr", type=float, default=4e-4)
    ap.add_argument("--seed", type=int, default=2)
    args = ap.parse_args()
    if "RANK" in os.environ:
        worker(int(os.environ["LOCAL_RANK"]), args)
    else:
        mp.spawn(worker, args=(args, args.nprocs, args.port), nprocs=args.nprocs)


if __name__ == "__main__":
    main()
