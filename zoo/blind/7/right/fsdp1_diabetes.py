import os
import torch
import torch.distributed as dist
import torch.nn as nn
from functools import partial
from sklearn.datasets import load_diabetes
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a = nn.Linear(dim, 64)
        self.b = nn.Linear(64, dim)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def fit(epochs=4, batch=40):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_diabetes()
    x = torch.tensor(d.data, dtype=torch.float32)[:440] * 20
    y = torch.tensor(d.target, dtype=torch.float32)[:440, None] / 100
    train = TensorDataset(x[:400], y[:400])
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, batch // world, sampler=sampler)

    torch.manual_seed(77)
    net = nn.Sequential(nn.Linear(10, 32), Block(32), Block(32), nn.Linear(32, 1))
    model = FSDP(
        net,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=2000),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 8e-3, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for bx, by in loader:
            opt.zero_grad()
            out = model(bx)
            loss = nn.functional.huber_loss(out, by)
            loss.backward()
            model.clip_grad_norm_(2.0)
            opt.step()
            sched.step()
            sums[0] += loss.item() * len(bx)
            sums[1] += len(bx)
        dist.all_reduce(sums)
        model.eval()
        with torch.no_grad():
            val = nn.functional.l1_loss(model(x[400:]), y[400:])
        model.train()
        if rank == 0:
            print(f"epoch {epoch} train {sums[0] / sums[1]:.5f} val mae {val.item():.5f} lr {sched.get_last_lr()[0]:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29703"}.items():
        os.environ.setdefault(k, v)
    fit()
