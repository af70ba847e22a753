"""Detection-like training with a loss that is normalised by the boxes of all ranks."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Scenes(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(13)
        self.x = torch.randn(n, 10, generator=g)
        self.count = torch.randint(1, 6, (n,), generator=g)
        self.boxes = torch.rand(n, 5, 4, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.boxes[i], self.count[i]


def box_loss(pred, boxes, count):
    mask = (torch.arange(5) < count[:, None]).float()
    per_box = (pred.view(-1, 5, 4) - boxes).abs().sum(-1) * mask
    total = dist_nn.all_reduce(per_box.sum())
    number = mask.sum()
    dist.all_reduce(number)
    return total / number


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Scenes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 20), nn.Sigmoid()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, boxes, count in loader:
            loss = box_loss(model(x), boxes, count)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
