"""Streaming data set cut into shards by process and by loader worker."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.set_num_threads(1)


class DigitStream(IterableDataset):
    def __init__(self, n, rank, world, seed=0):
        d = load_digits()
        self.x = torch.tensor(d.data[:n], dtype=torch.float32) / 16
        self.y = torch.tensor(d.target[:n])
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        return self.rank + worker, self.world * workers

    def __iter__(self):
        index, count = self.shard()
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for i in order[index::count].tolist():
            yield self.x[i], self.y[i]


def build_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main(epochs=3, global_batch=64, workers=2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    stream = DigitStream(1024, rank, world, seed=5)
    loader = DataLoader(stream, batch_size=global_batch // world, num_workers=workers)
    model = DDP(build_model())
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        totals = torch.zeros(3)
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            totals += torch.tensor([loss.item() * len(x), (out.argmax(1) == y).sum().item(), len(x)])
        dist.all_reduce(totals)
        if rank == 0:
            loss, acc = totals[0] / totals[2], totals[1] / totals[2]
            print(f"epoch {epoch}: {int(totals[2])} samples, loss {loss:.4f}, acc {acc:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
