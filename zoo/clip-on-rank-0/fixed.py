"""A recurrent forecaster with gradient clipping and a log of the norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, n=192, length=20):
        generator = torch.Generator().manual_seed(6)
        phase = torch.rand(n, 1, generator=generator) * 6.28
        speed = torch.rand(n, 1, generator=generator) + 0.5
        self.series = 3 * torch.sin(phase + speed * torch.arange(length + 1))

    def __len__(self):
        return len(self.series)

    def __getitem__(self, index):
        series = self.series[index].unsqueeze(1)
        return series[:-1], series[1:]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    dataset = Waves()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(Forecaster())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for past, future in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(past), future)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if rank == 0 and step % 8 == 0:
                print(f"step {step}: loss {loss.item():.4f}, norm {norm:.3f}")
            optimizer.step()
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
