"""Emotion from speech: arousal and valence of an utterance from frames of acoustic features.

A GRU reads the frames; training maximises the concordance correlation coefficient of each of
the two dimensions, the measure of the challenge, instead of a squared error.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FRAMES, FEATURES = 18, 6


class Utterances(Dataset):
    """Smooth random contours; the labels depend on their level, slope and spread."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        steps = torch.randn(n, FRAMES, FEATURES, generator=g) * 0.5
        level = torch.randn(n, 1, FEATURES, generator=g)
        self.frames = level + torch.cumsum(steps, 1) * 0.4
        slope = self.frames[:, -1] - self.frames[:, 0]
        arousal = torch.tanh(0.8 * self.frames[:, :, 0].mean(1) + 0.5 * slope[:, 1])
        valence = torch.tanh(0.7 * self.frames[:, :, 2].mean(1) * self.frames[:, :, 3].std(1) + 0.3)
        noise = torch.randn(n, 2, generator=g) * 0.1
        self.labels = torch.stack([arousal, valence], 1) + noise

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        return self.frames[i], self.labels[i]


class EmotionNet(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.gru = nn.GRU(FEATURES, width, batch_first=True)
        self.out = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, frames):
        states, _ = self.gru(frames)
        return self.out(states.mean(1))


class MeanOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def batch_mean(x):
    return MeanOverProcesses.apply(x.mean(0))


def ccc(prediction, label):
    """Concordance correlation of every column over the batch."""
    mean_p, mean_l = batch_mean(prediction), batch_mean(label)
    var_p = batch_mean((prediction - mean_p) ** 2)
    var_l = batch_mean((label - mean_l) ** 2)
    cov = batch_mean((prediction - mean_p) * (label - mean_l))
    return 2 * cov / (var_p + var_l + (mean_p - mean_l) ** 2 + 1e-8)


@torch.no_grad()
def test_score(net, data):
    p, l = net(data.frames), data.labels
    cov = ((p - p.mean(0)) * (l - l.mean(0))).mean(0)
    return 2 * cov / (p.var(0, correction=0) + l.var(0, correction=0) + (p.mean(0) - l.mean(0)) ** 2)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29612")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    train, test = Utterances(320, seed=11), Utterances(160, seed=12)
    sampler = DistributedSampler(train, shuffle=True, seed=5, drop_last=True)
    loader = DataLoader(train, batch_size=32 // world, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    net = DistributedDataParallel(EmotionNet())
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for frames, labels in loader:
            loss = (1 - ccc(net(frames), labels)).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            running += loss.detach() / len(loader)
        dist.all_reduce(running)
        arousal, valence = test_score(net.module, test)
        if rank == 0:
            print(f"epoch {epoch}: loss {running / world:.5f}, "
                  f"test ccc arousal {arousal:.5f} valence {valence:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
