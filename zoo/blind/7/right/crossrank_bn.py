"""CNN on digits whose batch normalisation uses the statistics of all processes (CPU version of SyncBatchNorm)."""
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class CrossBatchNorm2d(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        n = torch.tensor(x.numel() / x.shape[1])
        dist.all_reduce(n)
        mean = dist_fn.all_reduce(x.sum((0, 2, 3))) / n
        centred = x - mean[:, None, None]
        var = dist_fn.all_reduce(centred.square().sum((0, 2, 3))) / n
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]


def convert(m):
    for name, child in m.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(m, name, CrossBatchNorm2d(child.num_features))
        else:
            convert(child)
    return m


def build():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 10),
    )


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29707").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1280], y[:1280])
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, 64 // world, sampler=sampler, drop_last=True)
    torch.manual_seed(3)
    model = DDP(convert(build()))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for bx, by in loader:
            opt.zero_grad()
            F.cross_entropy(model(bx), by).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            out = model.module(x[1280:])
            loss, acc = F.cross_entropy(out, y[1280:]), (out.argmax(1) == y[1280:]).float().mean()
        if rank == 0:
            print(f"epoch {epoch} val loss {loss.item():.5f} acc {acc.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
