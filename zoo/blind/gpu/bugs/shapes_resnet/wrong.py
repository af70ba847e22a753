"""Small residual network with batch normalisation, bfloat16 autocast and channels_last."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10
BATCH = 24
EPOCHS = 3


def prototypes_with_noise(n, seed):
    base = torch.randn(CLASSES, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    base = F.avg_pool2d(base, 5, stride=1, padding=2) * 4
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    gain = 0.3 + 1.7 * torch.rand(n, 1, 1, 1, generator=g)
    x = gain * base[y] + torch.randn(n, 3, 24, 24, generator=g)
    return TensorDataset(x, y)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(h)))


class ShapeNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(), Residual(width), Residual(width),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(width, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    gpu = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    device = torch.device(f"cuda:{gpu}")
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")

    torch.manual_seed(17)
    train = prototypes_with_noise(384, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=9, drop_last=True)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler, pin_memory=True, drop_last=True)

    model = ShapeNet()
    if world > 1:
        model.backbone = nn.SyncBatchNorm.convert_sync_batchnorm(model.backbone)
    model = model.to(device, memory_format=torch.channels_last)
    ddp = DDP(model, device_ids=[gpu]) if world > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)

    torch.cuda.reset_peak_memory_stats(device)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen = torch.zeros(3, device=device)
        for x, y in loader:
            x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
            y = y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = ddp(x)
            loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            seen[0] += loss.detach() * y.numel()
            seen[1] += (logits.argmax(dim=1) == y).sum()
            seen[2] += y.numel()
        if world > 1:
            dist.all_reduce(seen)
        if rank == 0:
            loss_value, right, count = seen.tolist()
            peak = torch.cuda.max_memory_allocated(device) / 2 ** 20
            print(f"epoch {epoch} loss {loss_value / count:.4f} accuracy {right / count:.4f} peak {peak:.0f} MiB")

    model.eval()
    test = prototypes_with_noise(192, seed=3)
    x, y = (t[rank::world].to(device) for t in test.tensors)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        correct = (model(x.contiguous(memory_format=torch.channels_last)).argmax(dim=1) == y).sum()
    if world > 1:
        dist.all_reduce(correct)
    if rank == 0:
        print(f"test accuracy {correct.item() / len(test):.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
