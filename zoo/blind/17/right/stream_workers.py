import copy
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SHARDS, PER_SHARD, LENGTH, BATCH, EPOCHS, STOP_AT = 7, 116, 10, 48, 3, 24


def read_shard(index):
    g = torch.Generator().manual_seed(900 + index)
    for _ in range(PER_SHARD):
        bits = torch.randint(0, 2, (LENGTH,), generator=g)
        yield bits, int((bits[1:] != bits[:-1]).sum() > 4)


class ShuffledStream(IterableDataset):
    def __init__(self, rank, world, batch, buffer=100, seed=17):
        self.rank, self.world, self.batch, self.buffer, self.seed = rank, world, batch, buffer, seed
        self.epoch, self.first = 0, 0

    def records(self):
        rng = random.Random(self.seed * 1000 + self.epoch)
        shards = list(range(SHARDS))
        rng.shuffle(shards)
        pool = []
        for shard in shards:
            for record in read_shard(shard):
                if len(pool) < self.buffer:
                    pool.append(record)
                    continue
                i = rng.randrange(self.buffer)
                pool[i], record = record, pool[i]
                yield record
        rng.shuffle(pool)
        yield from pool

    def batches(self):
        group = []
        for record in self.records():
            group.append(record)
            if len(group) == self.batch:
                yield group
                group = []
        if group:
            yield group

    def __iter__(self):
        info = get_worker_info()
        workers, me = (info.num_workers, info.id) if info else (1, 0)
        for k, group in enumerate(self.batches()):
            if k >= self.first and (k - self.first) % workers == me:
                bits, label = zip(*group[self.rank::self.world])
                yield torch.stack(bits), torch.tensor(label)


class Counter(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(2, 8)
        self.rnn = nn.GRU(8, width, batch_first=True)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, bits):
        hidden, final = self.rnn(self.embed(bits))
        return self.head(torch.cat([hidden.mean(1), final[0]], dim=1))


class Run:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(6)
        self.model = Counter()
        self.net = DistributedDataParallel(self.model) if world > 1 else self.model
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=2e-3, momentum=0.5)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=51)
        self.stream = ShuffledStream(rank, world, BATCH)
        self.step, self.loss = 0, torch.zeros(2, dtype=torch.float64)

    def state(self):
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                              "schedule": self.schedule.state_dict(), "epoch": self.stream.epoch,
                              "first": self.stream.first, "step": self.step, "loss": self.loss})

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.stream.epoch, self.stream.first = state["epoch"], state["first"]
        self.step, self.loss = state["step"], state["loss"]

    def train(self, stop=None):
        while self.stream.epoch < EPOCHS:
            position = self.stream.first
            for bits, label in DataLoader(self.stream, batch_size=None, num_workers=2):
                loss = F.cross_entropy(self.net(bits), label)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.loss += torch.tensor([loss.item() * len(label), len(label)])
                self.step, position = self.step + 1, position + 1
                if self.step == stop:
                    self.stream.first = position
                    return
            self.report()
            self.stream.epoch, self.stream.first = self.stream.epoch + 1, 0

    def report(self):
        total = self.loss.clone()
        if self.world > 1:
            dist.all_reduce(total)
        if self.rank == 0:
            norm = nn.utils.parameters_to_vector(self.model.parameters()).norm().item()
            print(f"epoch {self.stream.epoch} step {self.step} records {int(total[1])} "
                  f"loss {total[0].item() / total[1].item():.5f} weights {norm:.5f}")
        self.loss.zero_()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    run = Run(rank, world)
    run.train(stop=STOP_AT)
    saved = run.state()
    run = Run(rank, world)
    run.restore(saved)
    run.train()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
