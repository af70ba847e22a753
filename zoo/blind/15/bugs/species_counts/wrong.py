"""Species of birds from features of their calls, with very unequal numbers of calls per species.

The class-balanced loss weighs a species by the effective number (1 - beta^n) / (1 - beta) of its
calls seen so far. The run is cut in two, as on a cluster with a time limit: the second job reads
weights, optimizer and tally from the first one's checkpoint.
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SPECIES, FEATURES, BATCH = 8, 20, 48
BETA = 0.99


def calls(n, seed):
    g = torch.Generator().manual_seed(seed)
    typical = torch.randn(SPECIES, FEATURES, generator=torch.Generator().manual_seed(5))
    species = torch.multinomial(0.55 ** torch.arange(SPECIES).double(), n, replacement=True, generator=g)
    x = typical[species] * (0.5 + torch.rand(n, 1, generator=g)) + 0.9 * torch.randn(n, FEATURES, generator=g)
    return TensorDataset(x, species)


class Tally:
    """Number of calls of each species; every process counts its own, `total` adds them up."""

    def __init__(self):
        self.counts = torch.zeros(SPECIES, dtype=torch.long)

    def update(self, species):
        self.counts += torch.bincount(species, minlength=SPECIES)

    def total(self):
        counts = self.counts.clone()
        dist.all_reduce(counts)
        return counts

    def state_dict(self):
        return {"counts": self.total()}

    def load_state_dict(self, state):
        self.counts = state["counts"].clone()

    def weights(self):
        effective = (1 - BETA ** self.total().double().clamp(min=1)) / (1 - BETA)
        weights = 1 / effective
        return (weights / weights.mean()).float()


class Job:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, SPECIES))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.tally, self.epoch = Tally(), 0

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "tally": self.tally.state_dict(), "epoch": self.epoch}
        if dist.get_rank() == 0:
            torch.save(state, path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.tally.load_state_dict(state["tally"])
        self.epoch = state["epoch"]

    def train(self, data, until):
        world = dist.get_world_size()
        net = DDP(self.model)
        sampler = DistributedSampler(data, seed=1)
        loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
        while self.epoch < until:
            sampler.set_epoch(self.epoch)
            total = torch.zeros(1)
            for x, species in loader:
                self.tally.update(species)
                weights = self.tally.weights()
                loss = (weights[species] * F.cross_entropy(net(x), species, reduction="none")).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.detach() / len(loader)
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch} loss {total.item() / world:.4f} "
                      f"rarest weighs {weights.max().item():.4f}", flush=True)
            self.epoch += 1


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29630").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    data = calls(288, seed=3)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "last.pt")

    first = Job(seed=1)
    first.train(data, until=3)
    first.save(path)
    second = Job(seed=2)
    second.load(path)
    second.train(data, until=6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
