"""Trains with a checkpoint every few steps and goes on from the last one."""

import io
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAVE_EVERY = 6


class Run:
    def __init__(self, dataset):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
        self.model = DDP(self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=12, sampler=self.sampler)
        self.epoch = self.step = 0

    def save(self):
        file = io.BytesIO()
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "epoch": self.epoch, "step": self.step}, file)
        return file.getvalue()

    def load(self, saved):
        state = torch.load(io.BytesIO(saved))
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step = state["epoch"], state["step"]

    def train(self, epochs, stop_after=None):
        saved, taken = None, 0
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            for x, y in islice(self.loader, self.step, None):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.step += 1
                taken += 1
                if self.step % SAVE_EVERY == 0:
                    saved = self.save()
                if taken == stop_after:
                    return saved
            self.epoch, self.step = self.epoch + 1, 0
        return saved


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(2)
    x = torch.randn(240, 8, generator=g)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    saved = Run(dataset).train(epochs=2, stop_after=16)
    resumed = Run(dataset)
    resumed.load(saved)
    print(f"rank {dist.get_rank()}: resuming epoch {resumed.epoch} at step {resumed.step}")
    resumed.train(epochs=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
