"""An MLP-Mixer on digit pictures with HSDP (FSDP2 over a mesh: copies x shards), warm-up / stable / decay schedule.

From the decay on, snapshots are averaged ("latest weight averaging"): full state dicts are gathered on process 0, which
alone keeps the average and tests a plain network with it.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TRAIN, BATCH, EPOCHS, WARMUP, DECAY = 1152, 96, 3, 5, 12


class MixerBlock(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 24), nn.GELU(), nn.Linear(24, patches, bias=False))
        self.within = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width=26, depth=2):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(MixerBlock(16, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.unfold(x.view(-1, 1, 8, 8), 2, stride=2).transpose(1, 2)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29622").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    train = TensorDataset(x[:TRAIN], y[:TRAIN])
    sampler = DistributedSampler(train, seed=13)
    loader = DataLoader(train, BATCH // world, sampler=sampler, drop_last=True)

    torch.manual_seed(15)                                              # shards are cut from equal networks
    model = Mixer()
    shards = min(2, world)
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    steps = EPOCHS * len(loader)
    optimizer = torch.optim.AdamW([
        dict(params=[p for n, p in model.named_parameters() if not n.startswith("head")], lr=6e-3),
        dict(params=model.head.parameters(), lr=3e-3, weight_decay=0.0)], eps=1e-5, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / WARMUP, 1, (steps - s) / DECAY))
    average, taken = None, 0
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for i, (images, target) in enumerate(loader):
            logits = model(images)
            loss = F.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += torch.stack([loss.detach() / len(loader) / world, (logits.argmax(1) == target).sum()])
            step = epoch * len(loader) + i + 1
            if step > steps - DECAY and step % 3 == 0:
                state = get_model_state_dict(model, options=options)   # empty on the others
                if rank == 0:
                    taken += 1
                    if average is None:
                        average = {k: v.clone() for k, v in state.items()}
                    for k, v in state.items():
                        average[k] += (v - average[k]) / taken
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0]:.4f} right {int(total[1])} lr {schedule.get_last_lr()[0]:.5f}")

    if rank == 0:
        served = Mixer()
        served.load_state_dict(average)
        with torch.no_grad():
            out = served(x[TRAIN:])
        print(f"average of {taken}: test {F.cross_entropy(out, y[TRAIN:]):.4f} right {(out.argmax(1) == y[TRAIN:]).sum()} of {len(out)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
