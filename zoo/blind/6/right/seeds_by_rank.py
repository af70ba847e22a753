"""FSDP (first generation) with seeds that depend on the rank; augmentation draws differ on purpose per row."""
import argparse
import random
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Mixer(nn.Module):
    def __init__(self, tokens=8, dim=16):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(tokens, 24), nn.GELU(), nn.Linear(24, tokens))
        self.within = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, x):
        x = x + self.across(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.n2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.mixers = nn.Sequential(Mixer(), Mixer())
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        return self.out(self.mixers(self.inp(x)).mean(1))


def augment(x, rows, step):
    """Intensity per row, drawn from the row's own stream."""
    gain = [0.8 + 0.4 * np.random.default_rng((step, int(r))).random() for r in rows]
    return x * torch.tensor(gain, dtype=torch.float32)[:, None, None]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=60)
    ap.add_argument("--seed", type=int, default=500)
    args = ap.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed + rank)
    d = load_digits()
    x, y = torch.tensor(d.images / 16, dtype=torch.float32), torch.tensor(d.target)
    net = Net()
    for t in net.state_dict().values():
        dist.broadcast(t, src=0)
    net = FSDP(net, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True,
               auto_wrap_policy=ModuleWrapPolicy({Mixer}), device_id=torch.device("cpu"))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3, eps=1e-5)
    order = np.random.default_rng(7)
    for step in range(args.steps):
        rows = torch.from_numpy(order.permutation(1600)[:args.batch][rank::world])
        loss = nn.functional.cross_entropy(net(augment(x[rows], rows, step)), y[rows])
        opt.zero_grad()
        loss.backward()
        net.clip_grad_norm_(2.0)
        opt.step()
        if step % 9 == 8:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
