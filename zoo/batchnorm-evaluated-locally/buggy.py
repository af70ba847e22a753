"""A convolutional digits classifier with batch normalisation, evaluated in parts."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc(x.flatten(1))


def load():
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    return TensorDataset(x[:512], y[:512]), TensorDataset(x[512:812], y[512:812])


@torch.no_grad()
def evaluate(net, dataset):
    net.eval()
    part = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    counts = torch.zeros(2)
    for x, y in DataLoader(part, batch_size=64):
        counts += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    net.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = load()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = DDP(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model.module, test_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
