"""Data-parallel training by hand, after PyTorch's tutorial on distributed applications."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim


class Partition:
    def __init__(self, data, index):
        self.data = data
        self.index = index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.data[self.index[i]]


class DigitsData(torch.utils.data.Dataset):
    def __init__(self, n=512):
        digits = load_digits()
        self.x = torch.tensor(digits.images[:n], dtype=torch.float32).unsqueeze(1) / 16
        self.y = torch.tensor(digits.target[:n])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, kernel_size=3)
        self.fc = nn.Linear(90, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv(x), 2))
        return F.log_softmax(self.fc(x.view(-1, 90)), dim=1)


def partition_dataset():
    size = dist.get_world_size()
    data = DigitsData()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1234)).tolist()
    partition = Partition(data, order[dist.get_rank() :: size])
    return torch.utils.data.DataLoader(partition, batch_size=64 // size, shuffle=True)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)


def run(rank):
    torch.manual_seed(1234)
    train_set = partition_dataset()
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(3):
        epoch_loss = 0.0
        for data, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank", rank, ", epoch", epoch, ":", epoch_loss / len(train_set))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]))
    dist.destroy_process_group()
