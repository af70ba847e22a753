"""Two moons in two jobs: the first one stops in the middle, the second one goes on from its file."""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 96
TOTAL = 80
STOP = 40


class Job:
    def __init__(self, path):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.path = path
        x, y = make_moons(1536, noise=0.2, random_state=0)
        self.data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
        self.batch = BATCH // self.world
        self.sampler = DistributedSampler(self.data, shuffle=True, seed=17)
        self.loader = DataLoader(self.data, batch_size=self.batch, sampler=self.sampler, drop_last=True)
        torch.manual_seed(1)
        self.model = DDP(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        self.step = 0
        if os.path.exists(path):
            state = torch.load(path)
            self.model.module.load_state_dict(state["model"])
            self.opt.load_state_dict(state["opt"])
            self.step = state["step"]

    def position(self):
        """Epoch and batch within it at which to go on."""
        per_epoch = len(self.data) // self.batch
        return divmod(self.step, per_epoch)

    def save(self):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "step": self.step},
                       self.path)
        dist.barrier()

    def run(self, until):
        epoch, skip = self.position()
        loss_fn = nn.BCEWithLogitsLoss()
        while self.step < until:
            self.sampler.set_epoch(epoch)
            for i, (x, y) in enumerate(self.loader):
                if i < skip:
                    continue
                loss = loss_fn(self.model(x).squeeze(1), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.step += 1
                if self.step == until:
                    break
            epoch, skip = epoch + 1, 0
        x, y = self.data.tensors
        with torch.no_grad():
            loss = loss_fn(self.model.module(x).squeeze(1), y).item()
        if self.rank == 0:
            print(f"step {self.step}: loss {loss:.6f}", flush=True)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29711")
    dist.init_process_group("gloo")
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, src=0)
    path = os.path.join(place[0], "last.pt")

    first = Job(path)
    first.run(STOP)
    first.save()
    del first
    second = Job(path)
    second.run(TOTAL)

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
