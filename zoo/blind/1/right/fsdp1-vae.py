import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class VAE(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 120), nn.SiLU(), nn.Linear(120, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 120), nn.SiLU(), nn.Linear(120, 64))

    def forward(self, x, noise=None):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu if noise is None else mu + noise * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo(x, out, mu, logvar, beta):
    rec = F.binary_cross_entropy_with_logits(out, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1)
    return rec, rec + beta * kl


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--noise", type=float, default=1.0)
    p.add_argument("--clip", type=float, default=4.0)
    a = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, held = TensorDataset(x[:1280]), x[1280:]
    sampler = DistributedSampler(train, num_replicas=world, rank=rank)
    loader = DataLoader(train, a.batch_size, sampler=sampler)

    torch.manual_seed(0)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=5000)
    model = FSDP(VAE(), auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.FULL_SHARD,
                 use_orig_params=False, device_id=torch.device("cpu"))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    gen = torch.Generator().manual_seed(2024 + rank)

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for i, (xb,) in enumerate(loader):
            noise = a.noise * torch.randn(len(xb), 6, generator=gen)
            out, mu, logvar = model(xb, noise)
            _, total = elbo(xb, out, mu, logvar, beta=1.0)
            loss = total.mean()
            loss.backward()
            norm = model.clip_grad_norm_(a.clip)
            opt.step()
            opt.zero_grad()
            if i % 10 == 0:
                print(f"rank {rank} epoch {epoch} batch {i} loss {loss.item():.3f} norm {float(norm):.2f}", flush=True)
        sched.step()
        with torch.no_grad():
            part = held[rank::world]
            rec, total = elbo(part, *model(part), beta=1.0)
            sums = torch.stack([rec.sum(), total.sum()])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: held-out reconstruction {sums[0] / len(held):.3f}, bound {sums[1] / len(held):.3f}", flush=True)

    with FSDP.summon_full_params(model, writeback=False):
        state = {k: v.clone() for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, "vae.pt")
        print("weights:", len(state), "tensors, checksum", f"{sum(v.double().abs().sum() for v in state.values()).item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
