"""Digits with a small convolutional net (the MNIST example, ported to torchrun)."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 24, 3, padding=1)
        self.fc1 = nn.Linear(24 * 4 * 4, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, loader, optimizer, epoch, rank):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            shown = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(shown)
                shown /= dist.get_world_size()
            if rank == 0:
                print(f"epoch {epoch} batch {batch_idx:3d} loss {shown.item():.5f}", flush=True)


@torch.no_grad()
def test(model, loader, total, rank):
    model.eval()
    stats = torch.zeros(2, dtype=torch.float64)
    for data, target in loader:
        output = model(data)
        stats[0] += F.nll_loss(output, target, reduction="sum").double()
        stats[1] += (output.argmax(1) == target).sum()
    if dist.is_initialized():
        dist.all_reduce(stats)
    if rank == 0:
        print(f"test loss {stats[0].item() / total:.5f} accuracy {int(stats[1])}/{total}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.6)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=6)
    args = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed + rank)

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train_set = TensorDataset(images[:1280], labels[:1280])
    test_set = TensorDataset(images[1280:], labels[1280:])
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=100)

    net = Net()
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, train_loader, optimizer, epoch, rank)
        test(net, test_loader, len(test_set), rank)
        scheduler.step()
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
