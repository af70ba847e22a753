"""Momentum contrast on noisy vectors, with a queue of negatives."""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n=96, dim=12):
        g = torch.Generator().manual_seed(3)
        base = torch.randn(n, dim, generator=g)
        self.q = base + 0.1 * torch.randn(n, dim, generator=g)
        self.k = base + 0.1 * torch.randn(n, dim, generator=g)

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        return self.q[i], self.k[i]


@torch.no_grad()
def concat_all_gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, dim=0)


def encoder(dim, feat):
    return nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, feat))


class MoCo(nn.Module):
    def __init__(self, dim=12, feat=8, K=48, m=0.9, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(dim, feat), encoder(dim, feat)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(feat, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.mul_(self.m).add_(q.data, alpha=1 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys):
        keys = keys.detach()
        n, ptr = keys.shape[0], int(self.queue_ptr)
        self.queue[:, ptr : ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ self.queue.clone().detach()
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self._enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    model = DistributedDataParallel(MoCo())
    data = TwoViews()
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, args.batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for im_q, im_k in loader:
            logits, labels = model(im_q, im_k)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
