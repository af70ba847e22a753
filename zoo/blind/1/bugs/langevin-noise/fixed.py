import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class PSGLD(torch.optim.Optimizer):
    """Preconditioned stochastic gradient Langevin dynamics (RMSprop preconditioner)."""

    def __init__(self, params, lr=1e-3, n_data=1000, alpha=0.99, eps=1e-5, prior=1e-4):
        super().__init__(params, dict(lr=lr, n_data=n_data, alpha=alpha, eps=eps, prior=prior))
        self.noise_gen = torch.Generator().manual_seed(2024)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sq"] = torch.ones_like(p)
                g = p.grad + group["prior"] * p
                state["sq"].mul_(group["alpha"]).addcmul_(g, g, value=1 - group["alpha"])
                pre = 1.0 / (state["sq"].sqrt() + group["eps"])
                noise = torch.randn(p.shape, generator=self.noise_gen)
                p.sub_(group["lr"] * pre * g)
                p.add_(noise * pre.sqrt() * math.sqrt(2 * group["lr"] / group["n_data"]))


def synthetic(n=768, d=12):
    g = torch.Generator().manual_seed(99)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, generator=g)
    y = torch.sin(x @ w) + 0.5 * x[:, 0] * x[:, 1] + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, y.unsqueeze(1))


def parse():
    ap = argparse.ArgumentParser("bayesian regression")
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=64, help="over all processes")
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--lr", type=float, default=0.02)
    return ap.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    data = synthetic()
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
    opt = PSGLD(model.parameters(), lr=args.lr, n_data=len(data))

    posterior = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(running)
        posterior.append({k: v.clone() for k, v in model.module.state_dict().items()})
        if rank == 0:
            print(f"epoch {epoch} mse {(running[0] / running[1]).item():.4f}")
    if rank == 0:
        torch.save(posterior, "posterior.pt")
        print(f"stored {len(posterior)} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
