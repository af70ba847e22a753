"""Trains two epochs, saves everything, loads it into new objects and trains two more."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class State:
    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(7, 28), nn.Tanh(), nn.Linear(28, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.epoch = 0

    def parts(self):
        return {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def dump(self):
        file = io.BytesIO()
        torch.save({"epoch": self.epoch, **{k: v.state_dict() for k, v in self.parts().items()}}, file)
        return file.getvalue()

    def restore(self, saved):
        state = torch.load(io.BytesIO(saved))
        self.epoch = state.pop("epoch")
        for name, value in state.items():
            self.parts()[name].load_state_dict(value)


def train(state, loader, until):
    model = DDP(state.net)
    while state.epoch < until:
        loader.sampler.set_epoch(state.epoch)
        for x, y in loader:
            state.optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            state.optimizer.step()
            state.scheduler.step()
        state.epoch += 1
        if dist.get_rank() == 0:
            print(f"epoch {state.epoch}: {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    x = torch.randn(192, 7, generator=torch.Generator().manual_seed(9))
    dataset = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    first = State()
    train(first, loader, until=2)
    second = State()
    second.restore(first.dump())
    train(second, loader, until=4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
