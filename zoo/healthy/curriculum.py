"""A sorting task whose sequences grow longer with the epochs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sequences(Dataset):
    """Those samples whose length is at most `limit`."""

    def __init__(self, limit):
        g = torch.Generator().manual_seed(6)
        length = torch.randint(2, 8, (160,), generator=g)
        values = torch.rand(160, 8, generator=g)
        mask = torch.arange(8) < length[:, None]
        keep = (length <= limit).nonzero().squeeze(1)
        keep = keep[: len(keep) // 16 * 16]
        self.x, self.y = (values * mask)[keep], (values * mask).max(1, keepdim=True).values[keep]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loader_for(epoch, batch):
    data = Sequences(limit=3 + epoch)
    sampler = DistributedSampler(data, shuffle=True)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch // dist.get_world_size(), sampler=sampler)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(4):
        loader = loader_for(epoch, 16)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} batches, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
