"""Diabetes progression: ZeRO stage 1, learning rate lowered on a validation plateau, stop in mid-epoch and resume."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 32
EPOCHS = 12
STOP_AT = 70  # optimizer steps; eleven make an epoch

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()

raw = load_diabetes()
features = torch.as_tensor(raw.data, dtype=torch.get_default_dtype()) * 20
target = torch.as_tensor(raw.target, dtype=torch.get_default_dtype())[:, None] / 100
shuffled = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
train_ids, val_ids = shuffled[:352], shuffled[352:]


class Run:
    """Everything that has to survive a restart."""

    def __init__(self):
        torch.manual_seed(42)
        net = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        self.model = DDP(net)
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.AdamW,
                                           lr=2e-2, weight_decay=1e-3)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.4, patience=0, threshold=1e-3)
        self.epoch, self.batch, self.steps = 0, 0, 0
        self.history = []

    def save(self, path):
        self.opt.consolidate_state_dict(to=0)
        if rank == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                        "plateau": self.plateau.state_dict(), "history": self.history,
                        "position": [self.epoch, self.batch, self.steps]}, path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path, map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.plateau.load_state_dict(state["plateau"])
        self.history = state["history"]
        self.epoch, self.batch, self.steps = state["position"]
        dist.barrier()

    @torch.no_grad()
    def validate(self):
        mine = val_ids[rank::world]
        err = self.model.module(features[mine]) - target[mine]
        sums = torch.stack([err.square().sum(), err.new_tensor(len(mine))])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def advance(self, max_steps=None):
        """Trains to the end, or until max_steps optimizer steps are done in all."""
        while self.epoch < EPOCHS:
            g = torch.Generator().manual_seed(900 + self.epoch)
            batches = train_ids[torch.randperm(len(train_ids), generator=g)].split(BATCH)
            while self.batch < len(batches):
                if self.steps == max_steps:
                    return
                mine = batches[self.batch][rank::world]
                loss = nn.functional.smooth_l1_loss(self.model(features[mine]), target[mine])
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.batch += 1
                self.steps += 1
            val = self.validate()
            self.plateau.step(val)
            self.history.append([val, self.opt.param_groups[0]["lr"]])
            self.epoch, self.batch = self.epoch + 1, 0


folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, src=0)
ckpt = os.path.join(folder[0], "run.pt")

first = Run()
first.advance(STOP_AT)
first.save(ckpt)
del first

second = Run()
second.load(ckpt)
second.advance()

if rank == 0:
    shutil.rmtree(folder[0])
    for epoch, (val, lr) in enumerate(second.history):
        print(f"epoch {epoch:2d}  validation mse {val:.6f}  next lr {lr:.5f}")
    print(f"{second.steps} steps")
dist.destroy_process_group()
