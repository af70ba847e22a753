"""Classification with a metric object and a progress line during evaluation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Accuracy:
    """Running accuracy over all processes."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.state = torch.zeros(2)

    def update(self, logits, target):
        self.state += torch.tensor([(logits.argmax(-1) == target).sum().item(), len(target)])

    def compute(self):
        state = self.state
        dist.all_reduce(state)
        return (state[0] / state[1]).item()


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 4
    x = torch.randn(n, 6, generator=g) + torch.eye(4, 6)[y] * 1.2
    return TensorDataset(x, y)


def validate(model, loader, metric, print_freq=2):
    model.eval()
    metric.reset()
    with torch.no_grad():
        for i, (x, y) in enumerate(loader):
            metric.update(model(x), y)
            if i % print_freq == 0:
                running = metric.compute()
                if dist.get_rank() == 0:
                    print(f"  [{i}/{len(loader)}] running accuracy {running:.3f}")
    return metric.compute()


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    train, test = blobs(96, 0), blobs(80, 1)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 24 // world, sampler=sampler)
    test_loader = DataLoader(test, 16 // world, sampler=DistributedSampler(test, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metric = Accuracy()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = validate(model, test_loader, metric)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
