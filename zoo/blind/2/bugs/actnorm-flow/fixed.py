"""RealNVP with activation normalisation on PCA-compressed digits, trained by maximum likelihood."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
DIM = 8


class ActNorm(nn.Module):
    """Scale and shift per feature; the first batch sets them to give zero mean and unit variance."""

    def __init__(self, dim):
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))

    @torch.no_grad()
    def initialise(self, x):
        stats = torch.stack([x.mean(0), x.pow(2).mean(0)])
        dist.all_reduce(stats)
        mean, second = stats / dist.get_world_size()
        std = (second - mean ** 2).clamp_min(1e-6).sqrt()
        self.log_scale.copy_(-std.log())
        self.shift.copy_(-mean)
        self.ready.fill_(1)

    def forward(self, x):
        if self.training and self.ready.item() == 0:
            self.initialise(x)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.flip, half = flip, dim // 2
        self.net = nn.Sequential(nn.Linear(half, 48), nn.ReLU(), nn.Linear(48, 2 * half))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat((b, a) if self.flip else (a, b), 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim=DIM, depth=4):
        super().__init__()
        layers = []
        for i in range(depth):
            layers += [ActNorm(dim), Coupling(dim, flip=i % 2 == 1)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        logdet = x.new_zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        return -(0.5 * (x ** 2).sum(1) + 0.5 * DIM * math.log(2 * math.pi)) + logdet


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(50)
    z = PCA(DIM, svd_solver="full").fit_transform(load_digits().data)
    ds = TensorDataset(torch.tensor(z[:1024], dtype=torch.float32))
    sampler = DistributedSampler(ds, seed=50)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler)
    model = DDP(Flow())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for (x,) in loader:
            loss = -model(x).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: nll {total.item() / world / len(loader):.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "flow.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
