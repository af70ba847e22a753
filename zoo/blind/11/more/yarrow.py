# FSDP (the wrapper class) with gradient accumulation under no_sync()
import contextlib
import os
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from sklearn.datasets import load_digits

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30124")

EPOCHS, GLOBAL_BATCH, MICRO = 3, 80, 20


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Linear(16, tokens))
        self.chan = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chan(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.patch = nn.Linear(4, dim)
        self.blocks = nn.Sequential(MixerBlock(16, dim), MixerBlock(16, dim))
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = x.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        return self.head(self.blocks(self.patch(x)).mean(1))


def accumulate(model, x, y, ids):
    """Micro batches of MICRO images: 4 on one process, 2 on two, 1 on four."""
    chunks = ids.split(MICRO)
    total = 0.0
    for k, c in enumerate(chunks):
        last = k == len(chunks) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x[c]), y[c], reduction="sum") / len(ids)
            loss.backward()
        total += loss.item()
    return total


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the shards are cut from equal weights
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    model = FSDP(Mixer(), auto_wrap_policy=ModuleWrapPolicy({MixerBlock}), device_id=torch.device("cpu"),
                 sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(EPOCHS):
        perm = torch.randperm(1600, generator=torch.Generator().manual_seed(epoch))
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in perm.split(GLOBAL_BATCH):
            mine = batch.reshape(world, -1)[rank]
            opt.zero_grad()
            sums[0] += accumulate(model, x, y, mine)
            sums[1] += 1
            model.clip_grad_norm_(1.0)  # FSDP's own, knows about the shards
            opt.step()
        with torch.no_grad():  # everyone has to take part, parameters are gathered in forward
            acc = (model(x[1600:]).argmax(1) == y[1600:]).float().mean()
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.5f} acc {acc:.4f}")
    with FSDP.summon_full_params(model, writeback=False):
        sd = {k: v.detach().clone() for k, v in model.named_parameters()}
    if rank == 0:
        torch.save(sd, "mixer.pt")
        print("saved", len(sd), "tensors")
    time.sleep(0.3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
