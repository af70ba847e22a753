"""Finding pulsars in folded radio profiles; the night's run is cut in two and goes on from its checkpoint."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
BINS, CANDIDATES, GLOBAL_BATCH, TOTAL_STEPS, CUT = 32, 1024, 64, 48, 25


def connect():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def profiles(n, seed):
    g = torch.Generator().manual_seed(seed)
    real = torch.rand(n, generator=g) < 0.4
    phase = torch.linspace(0, 1, BINS)
    centre = torch.rand(n, 1, generator=g)
    width = 0.03 + 0.05 * torch.rand(n, 1, generator=g)
    pulse = torch.exp(-((phase[None] - centre) ** 2) / (2 * width**2))
    return real[:, None] * 1.6 * pulse + torch.randn(n, BINS, generator=g), real.double()


class PulsarNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 8, 5, padding=2, padding_mode="circular")
        self.conv2 = nn.Conv1d(8, 16, 5, padding=2, padding_mode="circular")
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x[:, None]))
        return self.out(F.relu(self.conv2(x)).amax(2)).squeeze(1)


class Run:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(33)
        self.net = DDP(PulsarNet())
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=5e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.opt, 2e-2, total_steps=TOTAL_STEPS)
        self.step, self.epoch, self.consumed = 0, 0, 0

    def parts(self):
        return {"net": self.net.module, "opt": self.opt, "schedule": self.schedule}

    def save(self, path):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state.update(step=self.step, epoch=self.epoch, consumed=self.consumed)
        if self.rank == 0:
            torch.save(state, path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.step, self.epoch, self.consumed = state["step"], state["epoch"], state["consumed"]

    def train(self, x, y, until):
        while self.step < until:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.epoch))
            for batch in order[self.consumed:].split(GLOBAL_BATCH):
                mine = batch[self.rank::self.world]
                loss = F.binary_cross_entropy_with_logits(self.net(x[mine]), y[mine])
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.schedule.step()
                self.step += 1
                self.consumed += len(batch)
                if self.step == until:
                    return
            self.epoch, self.consumed = self.epoch + 1, 0


def main():
    rank, world = connect()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "night.pt")
    x, y = profiles(CANDIDATES, 1)
    xt, yt = profiles(256, 2)

    first = Run(rank, world)
    first.train(x, y, CUT)
    first.save(path)

    second = Run(rank, world)
    second.load(path)
    second.train(x, y, TOTAL_STEPS)
    if rank == 0:
        for name, run in (("at the cut", first), ("at the end", second)):
            with torch.no_grad():
                loss = F.binary_cross_entropy_with_logits(run.net.module(xt), yt)
            print(f"{name} step {run.step} epoch {run.epoch} test loss {loss:.8f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
