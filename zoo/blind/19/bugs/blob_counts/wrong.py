"""Counting cells in small synthetic microscope images; the test score is a correlation."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

SIDE = 16
GLOBAL_BATCH, EPOCHS = 32, 3


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    count = torch.randint(1, 9, (n,), generator=g)
    axis = torch.arange(SIDE, dtype=torch.float64)
    image = 0.1 * torch.randn(n, SIDE, SIDE, generator=g, dtype=torch.float64)
    for k in range(8):
        centre = 2 + (SIDE - 4) * torch.rand(n, 2, generator=g, dtype=torch.float64)
        row = torch.exp(-(axis - centre[:, :1]).square() / 2)
        column = torch.exp(-(axis - centre[:, 1:]).square() / 2)
        image += (k < count)[:, None, None] * row[:, :, None] * column[:, None, :]
    return image.unsqueeze(1), count.double()


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3))).squeeze(1)


@torch.no_grad()
def correlation(model, test, rank, world):
    mine = Subset(test, range(rank, len(test), world))
    guess = torch.cat([model(x) for x, _ in DataLoader(mine, batch_size=16)])
    parts = [torch.empty_like(guess) for _ in range(world)]
    dist.all_gather(parts, guess)
    guess = torch.cat(parts)
    truth = test.tensors[1]
    return torch.corrcoef(torch.stack([guess, truth]))[0, 1].item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    train = TensorDataset(*make_images(320, 1))
    test = TensorDataset(*make_images(128, 2))
    torch.manual_seed(0)
    model = Counter().double()
    ddp = DDP(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-2)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        mine = Subset(train, order[rank::world].tolist())
        ddp.train()
        running = torch.zeros((), dtype=torch.float64)
        for image, count in DataLoader(mine, batch_size=GLOBAL_BATCH // world):
            loss = (ddp(image) - count).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        model.eval()
        score = correlation(model, test, rank, world)
        if rank == 0:
            steps = len(train) // GLOBAL_BATCH
            print(f"epoch {epoch} loss {running.item() / world / steps:.6f} correlation {score:.6f}")

    if rank == 0:
        print(f"weight norm {sum(p.detach().square().sum() for p in model.parameters()).item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
