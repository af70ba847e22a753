"""Sparse autoencoder on the digits images."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SparseAE(nn.Module):
    def __init__(self, d_in=64, d_code=96):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d_in, 128), nn.ReLU(), nn.Linear(128, d_code))
        self.decoder = nn.Sequential(nn.Linear(d_code, 128), nn.ReLU(), nn.Linear(128, d_in))

    def forward(self, x):
        code = F.softplus(self.encoder(x))
        return self.decoder(code), code


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=96, help="total over all processes")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--l1", type=float, default=0.02)
    p.add_argument("--seed", type=int, default=7)
    return p.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    train_set, val = TensorDataset(images[:1440]), images[1440:]
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, drop_last=True)

    model = DDP(SparseAE())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (x,) in loader:
            out, code = model(x)
            recon = F.mse_loss(out, x, reduction="sum") / args.batch_size
            sparsity = code.sum(dim=1).mean()
            loss = recon + args.l1 * sparsity
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.stack([recon.detach(), sparsity.detach()])
        dist.all_reduce(total)
        total /= len(loader) * world
        if rank == 0:
            print(f"epoch {epoch} recon {total[0]:.4f} sparsity {total[1]:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        out, code = model.module(val)
        err = (out - val).pow(2).sum(1).mean().item()
        active = (code > 0.05).float().mean().item()
    if rank == 0:
        print(f"val error {err:.4f} active units {active:.3f}")
        path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"sparse_ae_{os.getpid()}.pt")
        torch.save(model.module.state_dict(), path)
        print("saved", path)
        os.remove(path)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
