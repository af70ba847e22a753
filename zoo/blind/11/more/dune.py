# SimCLR: contrastive pre-training on digits, negatives from all processes, and a linear probe afterwards
import os, time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier

for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "30104"}.items():
    os.environ.setdefault(k, v)


class GatherLayer(torch.autograd.Function):
    """Gather tensors from all processes, supporting backward propagation."""

    @staticmethod
    def forward(ctx, input):
        output = [torch.zeros_like(input) for _ in range(dist.get_world_size())]
        dist.all_gather(output, input)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]


class NTXent(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.t = temperature

    def forward(self, z_i, z_j):
        """Cross entropy of the LOCAL anchors against the views of the global batch."""
        n, r = z_i.size(0), dist.get_rank()
        z_i, z_j = F.normalize(z_i, dim=1), F.normalize(z_j, dim=1)
        all_i, all_j = torch.cat(GatherLayer.apply(z_i)), torch.cat(GatherLayer.apply(z_j))
        keys = torch.cat([all_i, all_j])
        N = all_i.size(0)
        own = torch.arange(n) + r * n
        logits_i, logits_j = z_i @ keys.t() / self.t, z_j @ keys.t() / self.t
        logits_i[torch.arange(n), own] = float("-inf")
        logits_j[torch.arange(n), own + N] = float("-inf")
        return 0.5 * (F.cross_entropy(logits_i, own + N) + F.cross_entropy(logits_j, own))


class SimCLR(nn.Module):
    def __init__(self, dim=64, projection_dim=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
                                     nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, dim))
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, projection_dim))

    def forward(self, x_i, x_j):
        return self.projector(self.encoder(x_i)), self.projector(self.encoder(x_j))


class TwoViews(torch.utils.data.Dataset):
    def __init__(self, images):
        self.images, self.epoch = images, 0

    def __len__(self):
        return len(self.images)

    def augment(self, x, g):
        dx, dy = torch.randint(-1, 2, (2,), generator=g).tolist()
        x = torch.roll(x, (dx, dy), (1, 2)) * (0.7 + 0.6 * torch.rand(1, generator=g))
        return x + 0.1 * torch.randn(x.shape, generator=g)

    def __getitem__(self, i):
        # own random stream for every image and epoch
        g = torch.Generator().manual_seed(self.epoch * 100_003 + i)
        return self.augment(self.images[i], g), self.augment(self.images[i], g)


def main(global_batch=128, epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)  # DDP takes the weights of rank 0
    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    train = TwoViews(X[:1536])
    sampler = torch.utils.data.DistributedSampler(train, seed=3, drop_last=True)
    loader = torch.utils.data.DataLoader(train, batch_size=global_batch // world, sampler=sampler, drop_last=True)
    model = DDP(SimCLR())
    criterion = NTXent(0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        total = 0.0
        for x_i, x_j in loader:
            optimizer.zero_grad()
            loss = criterion(*model(x_i, x_j))
            loss.backward()
            optimizer.step()
            scheduler.step()
            log = loss.detach().clone()
            dist.all_reduce(log)
            total += log.item() / world
        if rank == 0:
            print(f"Epoch [{epoch}/{epochs}]\t Loss: {total / len(loader):.4f}")
    if rank == 0:
        model.eval()
        with torch.no_grad():
            f = model.module.encoder(X).double().numpy()
        probe = RidgeClassifier(1.0).fit(f[:1536], y[:1536])
        print(f"linear probe: {probe.score(f[1536:], y[1536:]):.3f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
