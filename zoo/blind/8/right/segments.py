"""A stream of rows, stopped in the middle of an epoch and taken up again from the checkpoint."""
import itertools
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

BATCH, ROWS = 40, 1000


class Stream(IterableDataset):
    def __init__(self, x, y, rank, world):
        self.x, self.y, self.rank, self.world = x, y, rank, world
        self.epoch, self.skip = 0, 0

    def __iter__(self):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in itertools.islice(order, self.skip + self.rank, None, self.world):
            yield self.x[i], self.y[i]


def run(folder, until, rank, world):
    """Train up to the given step, beginning where the last checkpoint ended."""
    x, y = make_classification(ROWS + 200, n_features=14, n_informative=8, n_classes=3, random_state=17)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    stream = Stream(x[:ROWS], y[:ROWS], rank, world)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 3))
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=100)
    path, step = os.path.join(folder, "stream.ckpt"), 0
    if os.path.exists(path):
        saved = torch.load(path)
        net.load_state_dict(saved["net"])
        opt.load_state_dict(saved["opt"])
        sched.load_state_dict(saved["sched"])
        step = saved["step"]
    model = DDP(net)

    while step < until:
        stream.epoch, done = divmod(step, ROWS // BATCH)
        stream.skip = done * BATCH
        for xb, yb in DataLoader(stream, batch_size=BATCH // world):
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            if step % 10 == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                if rank == 0:
                    print(f"step {step} lr {sched.get_last_lr()[0]:.6f} loss {shown.item() / world:.5f}")
            if step == until:
                break
    if rank == world - 1:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "step": step}, path)
    dist.barrier()
    with torch.no_grad():
        return F.cross_entropy(net(x[ROWS:]), y[ROWS:]).item()


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29857")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    for until in (35, 80, 100):
        test = run(box[0], until, rank, world)
        if rank == 0:
            print(f"segment up to {until}: test loss {test:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
