"""Train in two parts; the second part goes on from the checkpoint of the first, in the middle of an epoch."""
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, FIRST, LAST = 64, 70, 120
PER_EPOCH = 1408


def data():
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def batches(seen, rank, world):
    """Endless batches, beginning after the given number of samples."""
    epoch, offset = divmod(seen, PER_EPOCH)
    share = BATCH // world
    while True:
        order = torch.randperm(PER_EPOCH, generator=torch.Generator().manual_seed(300 + epoch))
        for i in range(offset, PER_EPOCH, BATCH):
            yield order[i + rank * share:i + (rank + 1) * share]
        epoch, offset = epoch + 1, 0


class Job:
    def __init__(self, path, rank, world):
        self.path, self.rank, self.world = path, rank, world
        torch.manual_seed(61)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.step, self.seen = 0, 0
        if os.path.exists(path):
            state = torch.load(path)
            self.net.load_state_dict(state["net"])
            self.opt.load_state_dict(state["opt"])
            self.step, self.seen = state["step"], state["seen"]
        self.model = DDP(self.net)

    def save(self):
        if self.rank == 0:
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(),
                        "step": self.step, "seen": self.seen}, self.path)
        dist.barrier()

    def run(self, x, y, until):
        stream = batches(self.seen, self.rank, self.world)
        while self.step < until:
            rows = next(stream)
            loss = F.cross_entropy(self.model(x[rows]), y[rows])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            self.seen += len(rows)
            if self.step % 10 == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                if self.rank == 0:
                    print(f"step {self.step} loss {shown.item() / self.world:.5f}")
        self.save()


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29829")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "last.pt")

    Job(path, rank, world).run(x, y, FIRST)
    Job(path, rank, world).run(x, y, LAST)
    if rank == 0:
        print("finished at step", torch.load(path)["step"])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
