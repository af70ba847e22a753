import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class CrossRankBatchNorm2d(nn.Module):
    """nn.SyncBatchNorm has no CPU kernel."""

    def __init__(self, ch, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(ch))
        self.bias = nn.Parameter(torch.zeros(ch))
        self.register_buffer("running_mean", torch.zeros(ch))
        self.register_buffer("running_var", torch.ones(ch))

    def forward(self, x):
        if self.training:
            n = x.new_full((1,), x.numel() / x.size(1))
            stats = SumOverRanks.apply(torch.cat([x.sum((0, 2, 3)), x.pow(2).sum((0, 2, 3)), n]))
            s, sq, cnt = stats.split([x.size(1), x.size(1), 1])
            mean = s / cnt
            var = sq / cnt - mean * mean
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * cnt / (cnt - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        view = (1, -1, 1, 1)
        x = (x - mean.view(view)) * (var + self.eps).rsqrt().view(view)
        return x * self.weight.view(view) + self.bias.view(view)


def conv_bn(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


def convert(module):
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, CrossRankBatchNorm2d(child.num_features, child.eps, child.momentum))
        else:
            convert(child)
    return module


def accuracy(net, x, y, rank, world):
    net.eval()
    res = torch.zeros(2)
    with torch.no_grad():
        for i in range(rank * 40, len(x), world * 40):
            res[0] += (net(x[i:i + 40]).argmax(1) == y[i:i + 40]).sum()
            res[1] += len(x[i:i + 40])
    net.train()
    dist.all_reduce(res)
    return (res[0] / res[1]).item(), int(res[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16, torch.tensor(d.target)
    split = 1408
    train = TensorDataset(x[:split], y[:split])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size, sampler=sampler)

    torch.manual_seed(0)
    net = convert(nn.Sequential(conv_bn(1, 12), conv_bn(12, 24, 2), conv_bn(24, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)))
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[1], gamma=0.3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tot = torch.zeros(2)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item() * len(yb), len(yb)])
        sched.step()
        dist.all_reduce(tot)
        acc, n = accuracy(net, x[split:], y[split:], rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {tot[0] / tot[1]:.5f} | accuracy {acc:.4f} of {n}")
    if rank == 0:
        torch.save(net.state_dict(), "/tmp/crossbn_cnn.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
