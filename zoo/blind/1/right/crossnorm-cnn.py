"""Digits CNN with batch statistics shared by all replicas (nn.SyncBatchNorm has no CPU kernel)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distF
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CrossReplicaBN(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        n = x.shape[0] * x.shape[2] * x.shape[3]
        stats = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), x.new_tensor([float(n)])])
        stats = distF.all_reduce(stats)
        total = stats[-1].detach()
        mean, sq = (stats[:-1] / total).chunk(2)
        var = sq - mean * mean
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (total / (total - 1)), self.momentum)
        shape = (1, -1, 1, 1)
        x = (x - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        return x * self.weight.view(shape) + self.bias.view(shape)


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), CrossReplicaBN(cout), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(block(1, 12), block(12, 12), nn.MaxPool2d(2), block(12, 24))
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=24, help="per process")
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)

    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    y = torch.tensor(d.target)
    train, val = TensorDataset(x[:768], y[:768]), TensorDataset(x[768:1168], y[768:1168])

    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    net = Net()
    ddp = DDP(net, broadcast_buffers=False)
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=1e-2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for xb, yb in loader:
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(ddp(xb), yb)
            loss.backward()
            opt.step()
        if rank == 0:
            net.eval()
            with torch.no_grad():
                acc = (net(val.tensors[0]).argmax(1) == val.tensors[1]).float().mean()
            print(f"epoch {epoch}: last batch loss {loss.item():.4f}  val acc {acc:.4f}", flush=True)
        dist.barrier()

    if rank == 0:
        os.makedirs("runs", exist_ok=True)
        torch.save(net.state_dict(), "runs/crossnorm.pt")
        print(f"saved, world size {world}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
