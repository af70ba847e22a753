"""Fine-tunes a small image encoder on outlines of flowers with 3 to 7 petals.

The encoder's weights come from a released checkpoint (here: a fixed seed). As usual for small
data sets the head is trained alone for two epochs; then the encoder is trained along with it,
at a smaller rate.

    python train.py                            # one process
    torchrun --nproc-per-node 4 train.py       # same global batch of 64
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS, HEAD_EPOCHS = 64, 7, 2
LR_HEAD, LR_ENCODER = 0.1, 0.05
SIZE, CLASSES = 14, 5


def flowers(n, seed):
    """Grey pictures of r = 0.6 + a cos(k angle), turned at random; k is the class."""
    rng = np.random.default_rng(seed)
    axis = np.linspace(-1.0, 1.0, SIZE)
    gx, gy = np.meshgrid(axis, axis)
    radius, angle = np.hypot(gx, gy), np.arctan2(gy, gx)
    labels = rng.integers(0, CLASSES, n)
    turn, depth = rng.uniform(0, 2 * np.pi, n), rng.uniform(0.15, 0.3, n)
    edge = 0.6 + depth[:, None, None] * np.cos((labels + 3)[:, None, None] * (angle + turn[:, None, None]))
    images = 1.0 / (1.0 + np.exp((radius - edge) * 12)) + rng.normal(0, 0.08, edge.shape)
    return TensorDataset(torch.tensor(images[:, None], dtype=torch.float32), torch.tensor(labels))


class Encoder(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.GELU(),
            nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.GELU(),
            nn.Flatten(), nn.Linear(16 * 49, 32), nn.GELU())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


@torch.no_grad()
def evaluate(net, data):
    images, labels = data.tensors
    logits = net(images)
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train, test = flowers(384, seed=1), flowers(200, seed=2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)

    torch.manual_seed(7)
    model = Classifier()
    set_trainable(model.encoder, False)
    net = DDP(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=LR_HEAD, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        if epoch == HEAD_EPOCHS:
            set_trainable(model.encoder, True)
            net = DDP(model)
            optimizer.add_param_group({"params": list(model.encoder.parameters()), "lr": LR_ENCODER})
        total = torch.zeros(1)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        test_loss, accuracy = evaluate(model, test)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / world / len(loader):.4f} "
                  f"test {test_loss:.4f} accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
