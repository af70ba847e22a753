import copy
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Ema:
    """Exponential moving average of the weights, used for evaluation."""

    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for avg, p in zip(self.model.parameters(), model.parameters()):
            avg.lerp_(p, 1 - self.decay)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(256, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        return self.fc(F.relu(self.norm(self.conv2(x))).flatten(1))


def score(model, x, y):
    with torch.no_grad():
        logits = model(x)
    sums = torch.tensor([F.cross_entropy(logits, y, reduction="sum").item(),
                         (logits.argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(sums)
    return sums[:2] / sums[2]


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29828")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load_digits()
    x = torch.tensor(data.images / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(data.target)
    train = TensorDataset(x[:1280], y[:1280])
    x_test, y_test = x[1280:][rank::world], y[1280:][rank::world]
    sampler = DistributedSampler(train, seed=77)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler)

    torch.manual_seed(50)
    model = DistributedDataParallel(ConvNet())
    ema = Ema(model.module, decay=0.95)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(model.module)
        plain, averaged = score(model.module, x_test, y_test), score(ema.model, x_test, y_test)
        if rank == 0:
            print(f"epoch {epoch} plain {plain[0]:.5f}/{plain[1]:.4f} averaged {averaged[0]:.5f}/{averaged[1]:.4f}")
    if rank == 0:
        torch.save(ema.model.state_dict(), "digits_avg.pt")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
