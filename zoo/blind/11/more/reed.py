"""Stochastic weight averaging with cross-process batch normalisation (nn.SyncBatchNorm has no CPU kernels)."""
import os
import time
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from sklearn.datasets import load_breast_cancer

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30118")


class CrossProcessBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training or not x.requires_grad:
            # evaluation, or update_bn() where every process runs over all the data by itself
            return super().forward(x)
        n = len(x) * dist.get_world_size()
        mean = all_reduce(x.sum(0)) / n
        var = all_reduce(((x - mean) ** 2).sum(0)) / n
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def make_model(d):
    return nn.Sequential(nn.Linear(d, 40), CrossProcessBatchNorm(40), nn.ReLU(), nn.Linear(40, 40), CrossProcessBatchNorm(40), nn.ReLU(), nn.Linear(40, 2))


@torch.no_grad()
def test(model, x, y):
    model.eval()
    out = model(x)
    model.train()
    return nn.functional.cross_entropy(out, y).item(), (out.argmax(1) == y).double().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    g = torch.Generator().manual_seed(0)
    p = torch.randperm(len(x), generator=g)
    x, y = x[p], y[p]
    train, (xt, yt) = TensorDataset(x[:448], y[:448]), (x[448:], y[448:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler)
    bn_loader = DataLoader(train, batch_size=64)  # no sampler here: the same passes on all processes

    torch.manual_seed(1)
    model = make_model(x.shape[1])
    ddp = nn.parallel.DistributedDataParallel(model)
    swa_model = AveragedModel(model)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=14)
    swa_start, epochs = 6, 12
    swa_scheduler = SWALR(opt, anneal_epochs=2, swa_lr=0.03)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(ddp(xb), yb).backward()
            opt.step()
        if epoch >= swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        if rank == 0 and epoch % 3 == 2:
            print("epoch %d: test loss %.5f acc %.4f" % (epoch, *test(model, xt, yt)))
    with torch.no_grad():
        update_bn(bn_loader, swa_model)
    if rank == 0:
        print("swa (%d models): test loss %.5f acc %.4f" % (int(swa_model.n_averaged), *test(swa_model, xt, yt)))
        torch.save(swa_model.module.state_dict(), "swa.pt")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
