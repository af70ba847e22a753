"""A job that is cut off in the middle of an epoch and goes on from its bookmark."""
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn

BATCH = 40
N = 800
EPOCHS = 2
CUT_AFTER = 12          # optimizer steps until the job is cut off


def problem():
    g = torch.Generator().manual_seed(64)
    x = torch.randn(N, 9, generator=g)
    y = (x[:, 0] > 0).float() * x[:, 1] + 0.3 * x[:, 2:5].prod(1)
    return x, y


class Job:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.x, self.y = problem()
        torch.manual_seed(65)
        self.net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.epoch, self.consumed, self.step = 0, 0, 0

    def state(self):
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict(),
                "epoch": self.epoch, "consumed": self.consumed, "step": self.step}

    def load(self, path):
        s = torch.load(path)
        self.net.load_state_dict(s["net"])
        self.opt.load_state_dict(s["opt"])
        self.epoch, self.consumed, self.step = s["epoch"], s["consumed"], s["step"]

    def one_step(self, ids):
        mine = ids.chunk(self.world)[self.rank]
        loss = (self.net(self.x[mine]).squeeze(1) - self.y[mine]).square().mean()
        self.opt.zero_grad()
        loss.backward()
        for p in self.net.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)
        self.opt.step()
        self.step += 1
        self.consumed += len(ids)

    def run(self, until=None):
        while self.epoch < EPOCHS:
            order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch))
            for ids in order[self.consumed:].split(BATCH):
                self.one_step(ids)
                if self.step == until:
                    return
            self.epoch, self.consumed = self.epoch + 1, 0
            self.report()

    @torch.no_grad()
    def report(self):
        if self.rank == 0:
            err = (self.net(self.x).squeeze(1) - self.y).square().mean().item()
            print(f"epoch {self.epoch} done at step {self.step}: mse {err:.6f}", flush=True)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    path = os.path.join(place[0], "bookmark.pt")

    job = Job(rank, world)
    job.run(until=CUT_AFTER)
    if rank == 0:
        torch.save(job.state(), path)
    dist.barrier()

    job = Job(rank, world)
    job.load(path)
    job.run()
    dist.barrier()
    if rank == 0:
        os.remove(path)
        os.rmdir(place[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
