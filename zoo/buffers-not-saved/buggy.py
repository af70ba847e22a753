"""Trains a batch-normalised classifier, saves it, loads it and evaluates what was loaded."""

import io

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10))


def weights(net):
    return dict(net.named_parameters())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    dataset = TensorDataset(x[:384], y[:384])
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    net = build()
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(bx), by).backward()
            optimizer.step()
    dist.barrier()
    if rank == 0:
        file = io.BytesIO()
        torch.save(weights(net), file)
        file.seek(0)
        loaded = build()
        loaded.load_state_dict(torch.load(file), strict=False)
        loaded.eval()
        with torch.no_grad():
            accuracy = (loaded(x[384:]).argmax(1) == y[384:]).float().mean()
        print(f"accuracy of the saved model {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
