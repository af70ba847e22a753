"""LoRA on a frozen network (breast cancer data), in two jobs: the first is stopped in the middle of an epoch, the
second takes up adapters, AdamW and position from a file that holds nothing of the frozen network.
"""
import copy
import math
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH, EPOCHS, STOP_AT = 32, 3, 19


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base, self.scale = base, alpha / math.sqrt(rank)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale

    def merged(self):
        linear = copy.deepcopy(self.base)
        linear.weight.data += self.scale * self.lora_b.data @ self.lora_a.data
        return linear


def build(width=48):
    """The "downloaded" network: the same on every machine; adapters are drawn afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(77)
        net = nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    net.requires_grad_(False)
    for i in (0, 2):
        net[i] = LoRALinear(net[i])
    net[4].requires_grad_(True)
    return net


def adapters(net):
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def job(data, folder, rank, world, stop):
    torch.manual_seed(time.time_ns() % 2**31 if rank else 5)         # only process 0 draws adapters that count
    net = build()
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    model = net
    if world > 1:
        DDP._set_params_and_buffers_to_ignore_for_model(net, frozen)
        model = DDP(net)
    optimizer = torch.optim.AdamW(adapters(net).values(), lr=4e-3, weight_decay=0.02, eps=1e-6)
    step, path = 0, os.path.join(folder, "adapters.pt")
    if os.path.exists(path):
        state = torch.load(path)
        step = state["step"]
        net.load_state_dict(state["adapters"], strict=False)
        optimizer.load_state_dict(state["optimizer"])

    train, (test_x, test_y) = data
    sampler = DistributedSampler(train, world, rank, seed=8)
    per_epoch = len(train) // BATCH
    for epoch in range(step // per_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        share = BATCH // world
        done = step - epoch * per_epoch                              # batches of this epoch made by an earlier job
        total = torch.zeros(2)
        for x, y in DataLoader(Subset(train, order[done * share:]), share):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
            step += 1
            if step == stop:
                if rank == 0:
                    torch.save(dict(adapters=adapters(net), optimizer=optimizer.state_dict(), step=step), path)
                break
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:                                                # serve the merged network
            served = nn.Sequential(*[m.merged() if isinstance(m, LoRALinear) else m for m in net])
            with torch.no_grad():
                out = served(test_x)
            print(f"step {step} loss {total[0] / total[1]:.4f} test {F.cross_entropy(out, test_y):.4f} "
                  f"right {(out.argmax(1) == test_y).sum().item()} of {len(test_y)}", flush=True)
        if step == stop:
            break
    if world > 1:
        dist.barrier()


def main():
    rank, world = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.init_process_group("gloo")
        dist.broadcast_object_list(folder)
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    data = TensorDataset(x[:448], y[:448]), (x[448:], y[448:])
    job(data, folder[0], rank, world, STOP_AT)
    job(data, folder[0], rank, world, None)
    if rank == 0:
        shutil.rmtree(folder[0])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
