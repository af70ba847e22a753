"""DistributedDataParallel, started by torchrun or torch.distributed.launch."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
training, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main():
    """Trains two epochs, and prints the loss on held-out digits."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    model = DistributedDataParallel(model.to(device), device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(training)
    batches = DataLoader(training, batch_size=64 // size, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
    model.eval()
    total = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in DataLoader(held_out, batch_size=256 // size, sampler=DistributedSampler(held_out)):
            total[0] += F.cross_entropy(model(x.to(device)), y.to(device), reduction="sum")
            total[1] += len(y)
    dist.all_reduce(total)
    if rank == 0:
        torch.save(model.module.state_dict(), "digits.pt")
        print(f"final loss {total[0] / total[1]:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
