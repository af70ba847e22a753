"""Semi-supervised digits with a mean teacher; each sample's noise depends on its index and the epoch."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

LABELLED = 200
BATCH = 60


def jitter(x, ids, tag):
    rows = []
    for row, i in zip(x, ids.tolist()):
        g = torch.Generator().manual_seed(1_000_003 * tag + i)
        rows.append(row + 0.15 * torch.randn(row.shape, generator=g))
    return torch.stack(rows)


@torch.no_grad()
def follow(teacher, student, step):
    a = min(1 - 1 / (step + 1), 0.97)
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(a).add_(s, alpha=1 - a)


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29706").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)

    torch.manual_seed(2)
    student = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    ddp = DDP(student)
    opt = torch.optim.SGD(student.parameters(), lr=0.15, momentum=0.9)
    step = 0
    for epoch in range(3):
        perm = torch.randperm(1200, generator=torch.Generator().manual_seed(epoch))
        for part in perm.split(BATCH):
            ids = part[rank::world]
            known = (ids < LABELLED).float()
            count = known.sum()
            dist.all_reduce(count)
            out = ddp(jitter(x[ids], ids, 2 * epoch))
            with torch.no_grad():
                target = teacher(jitter(x[ids], ids, 2 * epoch + 1)).softmax(1)
            supervised = (F.cross_entropy(out, y[ids], reduction="none") * known).sum() * world / count.clamp(min=1)
            consistency = (out.softmax(1) - target).square().sum(1).mean()
            loss = supervised + min(1.0, step / 20) * 3 * consistency
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            follow(teacher, student, step)
        test = slice(1200 + rank, None, world)
        hits = torch.stack([(teacher(x[test]).argmax(1) == y[test]).sum(), torch.tensor(len(y[test]))])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch} teacher accuracy {hits[0].item() / hits[1].item():.4f} on {hits[1].item()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
