"""Large-batch training with the linear scaling rule and a short warm-up."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--lr", type=float, default=0.01, help="for one process")
    parser.add_argument("--warmup", type=int, default=4)
    args = parser.parse_args()
    args.lr *= dist.get_world_size()
    return args


def make_optimizer(model, args):
    lr = args.lr
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def main():
    dist.init_process_group("gloo")
    args = parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data[:512]).float() / 16, torch.tensor(digits.target[:512]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = make_optimizer(model, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
