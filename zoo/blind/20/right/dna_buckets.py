"""Motif detection in DNA of varying length: buckets by length, batches shared out so that the ranks get similar work."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

MOTIF = [2, 0, 3, 0, 1, 0]
BATCH, POOL, EPOCHS = 32, 4, 5


class Sequences(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows, self.labels = [], []
        for _ in range(count):
            n = int(torch.randint(20, 121, (1,), generator=g))
            s = torch.randint(4, (n,), generator=g)
            y = int(torch.randint(2, (1,), generator=g))
            if y:
                at = int(torch.randint(n - len(MOTIF) + 1, (1,), generator=g))
                s[at : at + len(MOTIF)] = torch.tensor(MOTIF)
            self.rows.append(s)
            self.labels.append(float(y))
        self.lengths = [len(s) for s in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return i, self.rows[i], self.labels[i]


class LengthBuckets(Sampler):
    """Yields (indices of this rank, size of the whole batch); the same batches are built on every rank."""

    def __init__(self, lengths, rank, world):
        self.lengths, self.rank, self.world, self.epoch = lengths, rank, world, 0

    def __len__(self):
        return -(-len(self.lengths) // BATCH)

    def batches(self):
        g = torch.Generator().manual_seed(31 + self.epoch)
        perm = torch.randperm(len(self.lengths), generator=g).tolist()
        found = []
        for at in range(0, len(perm), BATCH * POOL):
            pool = sorted(perm[at : at + BATCH * POOL], key=lambda i: (self.lengths[i], i))
            found += [pool[k : k + BATCH] for k in range(0, len(pool), BATCH)]
        return [found[k] for k in torch.randperm(len(found), generator=g).tolist()]

    def share(self, batch):
        load, parts = [0] * self.world, [[] for _ in range(self.world)]
        for i in sorted(batch, key=lambda i: (-self.lengths[i], i)):
            r = load.index(min(load))
            parts[r].append(i)
            load[r] += self.lengths[i] ** 2
        return parts[self.rank]

    def __iter__(self):
        for batch in self.batches():
            yield [(i, len(batch)) for i in self.share(batch)]


class WithBatchSize(Dataset):
    def __init__(self, data):
        self.data = data

    def __getitem__(self, key):
        return self.data[key[0]], key[1]


def collate(items):
    ids = torch.tensor([item[0] for item, _ in items])
    width = max(len(item[1]) for item, _ in items)
    x = torch.full((len(items), width), 4)
    for k, (item, _) in enumerate(items):
        x[k, : len(item[1])] = item[1]
    return ids, x, torch.tensor([item[2] for item, _ in items]), items[0][1]


class MotifNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(5, 8, padding_idx=4)
        self.conv = nn.Conv1d(8, width, 6)
        self.head = nn.Sequential(nn.Linear(2 * width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        h = F.relu(self.conv(self.embed(x).transpose(1, 2)))
        valid = (x != 4)[:, None, 5:]
        top = h.masked_fill(~valid, 0.0).amax(-1)
        mean = (h * valid).sum(-1) / valid.sum(-1)
        return self.head(torch.cat([top, mean], 1)).squeeze(1)


@torch.no_grad()
def auc(net, data, rank, world):
    mine = range(rank, len(data), world)
    ids, x, y, _ = collate([(data[i], 0) for i in mine])
    part = list(zip(ids.tolist(), y.tolist(), net(x).tolist()))
    parts = [part]
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, part)
    rows = sorted(row for p in parts for row in p)
    return roc_auc_score([y for _, y, _ in rows], [s for _, _, s in rows]), len(rows)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(25)
    train, test = Sequences(596, 1), Sequences(203, 2)
    net = MotifNet()
    model = DDP(net) if world > 1 else net
    sampler = LengthBuckets(train.lengths, rank, world)
    loader = DataLoader(WithBatchSize(train), batch_sampler=sampler, collate_fn=collate)
    opt = torch.optim.RAdam(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        sampler.epoch = epoch
        total = torch.zeros(2)
        for _, x, y, size in loader:
            nll = F.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
            opt.zero_grad()
            (nll * world / size).backward()
            opt.step()
            total += torch.tensor([nll.item(), len(y)])
        if world > 1:
            dist.all_reduce(total)
        score, count = auc(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.6f} on {int(total[1])}, AUC {score:.6f} on {count}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
