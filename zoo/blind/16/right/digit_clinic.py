import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12)
        self.conv2, self.norm2 = nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(4, 24)
        self.fc1, self.fc2 = nn.Linear(24 * 4, 48), nn.Linear(48, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train_epoch(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader, world_size):
    """Mean loss and confusion matrix over the whole set."""
    model.eval()
    loss, confusion = torch.zeros(1, dtype=torch.float64), torch.zeros(10, 10, dtype=torch.long)
    for data, target in loader:
        output = model(data)
        loss += F.cross_entropy(output, target, reduction="sum")
        confusion += torch.bincount(target * 10 + output.argmax(1), minlength=100).view(10, 10)
    if world_size > 1:
        dist.all_reduce(loss)
        dist.all_reduce(confusion)
    return (loss / confusion.sum()).item(), confusion


def macro_f1(confusion):
    hit = confusion.diag().double()
    return (2 * hit / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean().item()


def main():
    parser = argparse.ArgumentParser(description="Digits, data parallel")
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)

    digits = load_digits()
    images = torch.tensor(digits.images).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train_set = Subset(dataset, range(1408))
    valid_set = Subset(dataset, range(1408 + rank, 1610, world_size))
    test_set = Subset(dataset, range(1610 + rank, len(dataset), world_size))
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler)
    valid_loader, test_loader = DataLoader(valid_set, batch_size=32), DataLoader(test_set, batch_size=32)

    model = Net().double()
    if world_size > 1:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5, weight_decay=1e-4)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.2)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if world_size > 1:
        dist.broadcast_object_list(folder)
    best_path = os.path.join(folder[0], "best.pt")
    best, since = float("inf"), 0

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer)
        valid_loss, confusion = evaluate(model, valid_loader, world_size)
        scheduler.step(valid_loss)
        if valid_loss < best - 0.01:
            best, since = valid_loss, 0
            if rank == 0:
                raw = model.module if world_size > 1 else model
                torch.save(raw.state_dict(), best_path)
        else:
            since += 1
        if rank == 0:
            print(f"epoch {epoch}: valid loss {valid_loss:.6f} f1 {macro_f1(confusion):.4f} "
                  f"lr {optimizer.param_groups[0]['lr']:.4f}")
        if since >= args.patience:
            break

    if world_size > 1:
        dist.barrier()
    raw = model.module if world_size > 1 else model
    raw.load_state_dict(torch.load(best_path, weights_only=True))
    test_loss, confusion = evaluate(raw, test_loader, world_size)
    if rank == 0:
        print(f"test: loss {test_loss:.6f} f1 {macro_f1(confusion):.4f} of {confusion.sum()} images")
    if world_size > 1:
        dist.barrier()
    if rank == 0:
        os.remove(best_path)
        os.rmdir(folder[0])
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
