"""Classify vibration windows that are read from eight recordings, one window from each in turn."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

RECORDINGS, WINDOWS, SAMPLES, CLASSES = 8, 60, 32, 4


def read_recording(number):
    gen = torch.Generator().manual_seed(1000 + number)
    label = torch.randint(CLASSES, (WINDOWS,), generator=gen)
    time = torch.arange(SAMPLES)
    speed = 0.2 + 0.15 * label[:, None] + 0.01 * number
    phase = 6.28 * torch.rand(WINDOWS, 1, generator=gen)
    wave = torch.sin(speed * time + phase) * (1 + 0.1 * number)
    return wave + 0.4 * torch.randn(WINDOWS, SAMPLES, generator=gen), label


class Recordings(IterableDataset):
    def __init__(self, numbers, passes):
        self.parts = [read_recording(n) for n in numbers]
        self.passes = passes

    def windows(self):
        for _ in range(self.passes):
            for i in range(WINDOWS):
                for wave, label in self.parts:
                    yield wave[i], label[i]

    def __iter__(self):
        return self.windows()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 12, 5, padding=2)
        self.conv2 = nn.Conv1d(12, 12, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(3, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv1(x[:, None]))
        x = F.relu(self.norm(self.conv2(x)))
        return self.head(x.amax(-1))


def validate(net):
    right, total, loss = 0, 0, 0.0
    with torch.no_grad():
        for number in (20, 21):
            wave, label = read_recording(number)
            out = net(wave)
            loss += F.cross_entropy(out, label, reduction="sum").item()
            right += (out.argmax(1) == label).sum().item()
            total += len(label)
    return loss / total, right / total


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = 0, 1
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    numbers = list(range(RECORDINGS))[rank::world]
    loader = DataLoader(Recordings(numbers, passes=40), batch_size=32 // world)
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)
    for step, (wave, label) in enumerate(loader, 1):
        loss = F.cross_entropy(model(wave), label)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        plan.step()
        if step % 15 == 0:
            value, accuracy = validate(net)
            if rank == 0:
                print(f"step {step}: validation loss {value:.8f}, accuracy {accuracy:.4f}")
        if step == 60:
            break
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
