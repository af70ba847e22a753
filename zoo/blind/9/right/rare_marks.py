"""Class for every row, position only for the few marked rows; many shares of a batch have none of them."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel as DDP


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(18, 40), nn.ReLU())
        self.cls = nn.Linear(40, 2)
        self.box = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, marked):
        h = self.body(x)
        boxes = self.box(h[marked]) if marked.any() else None
        return self.cls(h), boxes


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29941")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(1280, 18, n_informative=9, weights=[0.93], random_state=6)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    boxes = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3]], 1)

    torch.manual_seed(66)
    model = DDP(Detector(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(60 + epoch))
        sums = torch.zeros(3)
        for block in perm.split(32):
            rows = block[rank::world]
            marked = y[rows] == 1
            marks = marked.sum()
            dist.all_reduce(marks)
            logits, guess = model(x[rows], marked)
            loss = F.cross_entropy(logits, y[rows])
            sums[0] += loss.detach() / world / 40
            if guess is not None:
                off = F.smooth_l1_loss(guess, boxes[rows][marked], reduction="sum")
                sums[1] += off.detach()
                loss = loss + off * world / marks
            sums[2] += marked.sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} class {sums[0]:.5f} box {sums[1] / sums[2]:.5f} marks {int(sums[2])}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
