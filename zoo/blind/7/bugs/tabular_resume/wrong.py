"""Diabetes regression with a checkpoint in the middle of an epoch."""
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 20
STOP_AT = 27
EPOCHS = 3


class Job:
    def __init__(self, rank, world, folder):
        self.rank, self.world, self.folder = rank, world, Path(folder)
        data = load_diabetes(scaled=True)
        self.x = torch.tensor(data.data, dtype=torch.float32)[:440] * 10
        t = torch.tensor(data.target, dtype=torch.float32)[:440]
        self.y = ((t - t.mean()) / t.std()).unsqueeze(1)
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ELU(), nn.Linear(64, 32), nn.ELU(), nn.Linear(32, 1))
        self.ddp = DDP(self.net)
        self.opt = torch.optim.Adagrad(self.net.parameters(), lr=0.03)
        self.seen = 0

    def my_rows(self, epoch):
        perm = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(1000 + epoch))
        return perm[self.rank::self.world]

    def save(self):
        if self.rank == 0:
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict()}, self.folder / "last.pt")
            (self.folder / "progress.json").write_text(json.dumps({"samples_seen": self.seen}))
        dist.barrier()

    def load(self):
        state = torch.load(self.folder / "last.pt")
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.seen = json.loads((self.folder / "progress.json").read_text())["samples_seen"]

    def train(self, max_steps=None):
        steps = 0
        epoch, offset = divmod(self.seen, len(self.x))
        while epoch < EPOCHS:
            rows = self.my_rows(epoch)
            rows = rows[offset:]
            for part in rows.split(BATCH // self.world):
                loss = nn.functional.smooth_l1_loss(self.ddp(self.x[part]), self.y[part])
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.seen += len(part) * self.world
                steps += 1
                if steps == max_steps:
                    return
            epoch, offset = epoch + 1, 0
            self.report(epoch)

    @torch.no_grad()
    def report(self, epoch):
        err = (self.net(self.x) - self.y).abs().mean()
        if self.rank == 0:
            print(f"after epoch {epoch}: mae {err:.5f}")


def main():
    rank = int(os.environ.setdefault("RANK", "0"))
    world = int(os.environ.setdefault("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29581")
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)

    job = Job(rank, world, where[0])
    job.train(max_steps=STOP_AT)
    job.save()

    job = Job(rank, world, where[0])
    job.load()
    job.train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
