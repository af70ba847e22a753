# HSDP: parameters are sharded inside a group and replicated over groups. Four micro-batches per update.
import argparse, time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Mixer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.rows = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))
        self.cols = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = x + self.rows(self.norm(x))
        xt = x.transpose(1, 2)
        return (xt + self.cols(self.norm(xt))).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(depth))
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        for l in self.layers:
            x = l(x)
        return self.fc(x.flatten(1))


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--replicas", type=int, default=0, help="0: one replica per rank")
    ap.add_argument("--micro-batch", type=int, default=12)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=2e-3)
    return ap.parse_args()


def main():
    args = get_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = args.replicas or world
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))

    d = load_digits()
    imgs = torch.from_numpy((d.images / 8.0 - 1.0).astype(np.float32))
    lab = torch.from_numpy(d.target)
    train = TensorDataset(imgs[:1344], lab[:1344])
    hold_x, hold_y = imgs[1344:], lab[1344:]

    torch.manual_seed(3)
    net = Net()
    for l in net.layers:
        fully_shard(l, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)

    # all ranks are data ranks, in the shard dimension too
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=3, drop_last=True)
    loader = DataLoader(train, batch_size=args.micro_batch, sampler=sampler, drop_last=True)
    ce = nn.CrossEntropyLoss()
    updates = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for i, (x, y) in enumerate(loader):
            boundary = (i + 1) % args.accum == 0
            net.set_requires_gradient_sync(boundary)
            loss = ce(net(x), y)
            (loss / args.accum).backward()
            meter += torch.tensor([loss.item(), 1.0])
            if boundary:
                opt.step()
                opt.zero_grad()
                updates += 1
        dist.all_reduce(meter)
        if rank == 0:
            print(f"[epoch {epoch}] loss {meter[0] / meter[1]:.4f} after {updates} updates")

    # with sharded weights every rank joins the forward; same inputs, same answer everywhere
    net.eval()
    with torch.no_grad():
        pred = net(hold_x).argmax(1)
    acc = (pred == hold_y).float().mean().item()
    if rank == 0:
        print(f"holdout accuracy {acc:.4f} on {len(hold_y)} images")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
