import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Z = 16


def make_generator():
    return nn.Sequential(nn.Linear(Z, 64), nn.LeakyReLU(0.2), nn.Linear(64, 96), nn.LeakyReLU(0.2), nn.Linear(96, 64), nn.Sigmoid())


def make_critic():
    return nn.Sequential(nn.Linear(64, 96), nn.LeakyReLU(0.2), nn.Linear(96, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))


class LatentSource:
    """Noise of one process: every process has a stream of its own unless all draw from the common one."""

    def __init__(self, rank, world, shared):
        self.rank, self.world, self.shared = rank, world, shared
        self.gen = torch.Generator().manual_seed(99 if shared else 99 + rank)

    def __call__(self, n):
        if self.shared:
            return torch.randn(n * self.world, Z, generator=self.gen)[self.rank::self.world]
        return torch.randn(n, Z, generator=self.gen)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--shared-noise", action="store_true")
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)

    x = torch.tensor(load_digits().data, dtype=torch.float32)[:960] / 16
    ds = TensorDataset(x)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=args.batch, sampler=sampler)
    G, D = DDP(make_generator()), DDP(make_critic())
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    latent = LatentSource(rank, world, args.shared_noise)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3)
        for (real,) in loader:
            with torch.no_grad():
                fake = G.module(latent(len(real)))
            scores = D(torch.cat([real, fake]))
            s_real, s_fake = scores.chunk(2)
            loss_d = F.softplus(-s_real).mean() + F.softplus(s_fake).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

            for p in D.parameters():
                p.requires_grad_(False)
            loss_g = F.softplus(-D.module(G(latent(len(real))))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            for p in D.parameters():
                p.requires_grad_(True)
            sums += torch.tensor([loss_d.item(), loss_g.item(), 1.0])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} D {sums[0] / sums[2]:.4f} G {sums[1] / sums[2]:.4f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            pics = G.module(torch.randn(64, Z, generator=torch.Generator().manual_seed(1)))
        print(f"pixel mean real {x.mean():.3f} fake {pics.mean():.3f}, std over samples real {x.std(0).mean():.3f} fake {pics.std(0).mean():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
