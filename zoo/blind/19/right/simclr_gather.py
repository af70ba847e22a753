"""SimCLR on 8x8 digits under DDP; every rank contrasts its rows with the embeddings of all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, EPOCHS = 64, 3


class TwoViews(Dataset):
    """Augmentation noise is a function of (epoch, index), whoever loads the sample."""

    def __init__(self, images):
        self.images, self.epoch = images, 0

    def __len__(self):
        return len(self.images)

    def augment(self, img, g):
        dx, dy = torch.randint(-1, 2, (2,), generator=g).tolist()
        img = torch.roll(img.view(8, 8), (dx, dy), (0, 1))
        img = img * (0.7 + 0.6 * torch.rand((), generator=g))
        img = img + 0.1 * torch.randn(8, 8, generator=g)
        return (img * (torch.rand(8, 8, generator=g) > 0.15)).flatten()

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * 100_003 + i)
        return self.augment(self.images[i], g), self.augment(self.images[i], g)


class Indexed(TwoViews):
    def __getitem__(self, i):
        return i, self.images[i]


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64))
        self.projector = nn.Sequential(nn.GELU(), nn.Linear(64, 32))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1), self.log_scale.exp()


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # what all ranks' losses say about my rows
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def nt_xent(za, zb, scale, rank, world):
    """Mean over the local rows; the mean over ranks (by DDP) is then the loss of the global batch."""
    if world > 1:
        all_a, all_b = GatherRows.apply(za), GatherRows.apply(zb)
    else:
        all_a, all_b = za, zb
    n = len(za)
    own = torch.arange(n) + rank * n
    loss = 0.0
    for mine, same, other in ((za, all_a, all_b), (zb, all_b, all_a)):
        to_same = (scale * mine @ same.T).scatter(1, own[:, None], float("-inf"))
        logits = torch.cat([scale * mine @ other.T, to_same], 1)
        loss = loss + F.cross_entropy(logits, own) / 2
    return loss


@torch.no_grad()
def embed_all(net, images, rank, world):
    """Embeddings in the order of the data set; the sampler's padded repeats land on the same row."""
    data = Indexed(images)
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    ids, feats = [], []
    for i, x in DataLoader(data, batch_size=50, sampler=sampler):
        ids.append(i)
        feats.append(F.normalize(net.backbone(x), dim=1))
    ids, feats = torch.cat(ids), torch.cat(feats)
    if world > 1:
        all_ids, all_feats = [torch.empty_like(ids) for _ in range(world)], [torch.empty_like(feats) for _ in range(world)]
        dist.all_gather(all_ids, ids)
        dist.all_gather(all_feats, feats)
        ids, feats = torch.cat(all_ids), torch.cat(all_feats)
    out = torch.empty(len(images), feats.size(1), dtype=feats.dtype)
    out[ids] = feats
    return out


def knn(bank, bank_y, query, query_y, k=5):
    top = (query @ bank.T).topk(k, 1).indices
    votes = F.one_hot(bank_y[top], 10).sum(1)
    return (votes.argmax(1) == query_y).double().mean().item()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16.0), torch.tensor(digits.target)
    train, test = images[:1286], images[1286:1797]

    torch.manual_seed(0)
    net = SimCLR()
    model = DistributedDataParallel(net) if world > 1 else net
    views = TwoViews(train)
    sampler = DistributedSampler(views, world, rank, shuffle=True, seed=5, drop_last=True)
    per_rank = BATCH // world
    steps = len(train) // BATCH
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, EPOCHS * steps)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        views.epoch, running = epoch, torch.zeros(())
        loader = DataLoader(views, batch_size=per_rank, sampler=sampler, drop_last=True)
        for _, (a, b) in zip(range(steps), loader):
            z, scale = model(torch.cat([a, b]))
            loss = nt_xent(*z.chunk(2), scale, rank, world)
            optim.zero_grad()
            loss.backward()
            optim.step()
            sched.step()
            running += loss.detach() / steps
        if world > 1:
            dist.all_reduce(running)
        bank, query = embed_all(net, train, rank, world), embed_all(net, test, rank, world)
        if rank == 0:
            acc = knn(bank, labels[:1286], query, labels[1286:1797])
            print(f"epoch {epoch} loss {running.item() / world:.10f} kNN {acc:.6f} scale {net.log_scale.exp().item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
