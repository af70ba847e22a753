"""Training in two parts with a checkpoint between them; scored with averaged weights."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = "last.ckpt"


class Ema:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for a, p in zip(self.model.parameters(), model.parameters()):
            a.mul_(self.decay).add_(p, alpha=1 - self.decay)


class Run:
    def __init__(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
        self.model = DDP(net)
        self.optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        self.epoch = 0
        self.ema = Ema(net)

    def save(self):
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}
        if dist.get_rank() == 0:
            torch.save(state, PATH)
        dist.barrier()

    def resume(self):
        state = torch.load(PATH)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        self.ema = Ema(self.model.module)

    def train(self, data, until):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler)
        while self.epoch < until:
            sampler.set_epoch(self.epoch)
            for x, y in loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                self.ema.update(self.model.module)
            self.epoch += 1

    @torch.no_grad()
    def evaluate(self, data):
        loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
        total = torch.zeros(2)
        for x, y in loader:
            total += torch.tensor([(self.ema.model(x) - y).pow(2).sum().item(), len(y)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(112, 5, generator=g)
    y = (x[:, :1] * x[:, 1:2]).tanh()
    train, val = TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:])
    first = Run()
    first.train(train, until=2)
    first.save()
    second = Run()
    second.resume()
    second.train(train, until=3)
    loss = second.evaluate(val)
    if dist.get_rank() == 0:
        print(f"epoch {second.epoch} val loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
