"""Progressive unfreezing: the head first, the encoder from the second epoch on."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, width), nn.Tanh())
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def set_trainable(module, flag):
    for parameter in module.parameters():
        parameter.requires_grad = flag


def run_epoch(model, loader, optimizer):
    criterion = nn.CrossEntropyLoss()
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    torch.manual_seed(1)
    x = torch.randn(256, 16)
    y = (x[:, :4] * 2 + x[:, 4:8]).argmax(1)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    classifier = Classifier()
    set_trainable(classifier.encoder, flag=False)
    model = DDP(classifier)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if epoch == 1:
            set_trainable(classifier.encoder, flag=True)
            model = DDP(classifier)
        if epoch <= 1:
            trainable = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trainable, lr=0.1)
        loss = run_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
