"""Texture classification, recipe as in the usual image training scripts."""
import argparse
import contextlib
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
parser.add_argument("--grad-accum-steps", type=int, default=2)
parser.add_argument("--lr-base", type=float, default=4e-3)
parser.add_argument("--lr-base-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--reprob", type=float, default=0.25)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--model-ema-decay", type=float, default=0.95)
parser.add_argument("--seed", type=int, default=42)


class Textures(Dataset):
    def __init__(self, n, seed, augment, reprob=0.0):
        g = torch.Generator().manual_seed(seed)
        self.target = torch.randint(0, 6, (n,), generator=g)
        grid = torch.arange(12.0)
        phase = torch.rand(n, 1, 1, generator=g) * 6.28
        fx = (0.4 + 0.3 * (self.target % 3)).view(n, 1, 1)
        fy = (0.3 + 0.5 * (self.target // 3)).view(n, 1, 1)
        wave = torch.sin(fx * grid.view(1, 1, 12) + fy * grid.view(1, 12, 1) + phase)
        self.images = (wave + 0.6 * torch.randn(n, 12, 12, generator=g)).unsqueeze(1)
        self.augment, self.reprob = augment, reprob

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        img = self.images[i]
        if self.augment:
            img = torch.roll(img, int(torch.randint(-2, 3, ())), dims=2)
            if torch.rand(()) < self.reprob:
                top, left = torch.randint(0, 8, (2,)).tolist()
                img = img.clone()
                img[:, top:top + 4, left:left + 4] = torch.randn(1, 4, 4)
        return img, self.target[i]


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def create_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2), nn.GroupNorm(1, 16), nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1), nn.GroupNorm(1, 32), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 6))


def lr_at(update, total, warmup, base):
    if update < warmup:
        return base * (update + 1) / warmup
    return 0.5 * base * (1 + math.cos(math.pi * (update - warmup) / max(1, total - warmup)))


def validate(model, dataset, rank, world):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for part in torch.arange(rank, len(dataset), world).split(64):
            output, target = model(dataset.images[part]), dataset.target[part]
            sums += torch.tensor([nn.functional.cross_entropy(output, target, reduction="sum").item(),
                                  (output.argmax(1) == target).sum().item(), len(part)])
    if world > 1:
        dist.all_reduce(sums)
    return sums[0].item() / sums[2].item(), 100 * sums[1].item() / sums[2].item()


def main():
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed + rank)
    lr = args.lr_base * args.batch_size * args.grad_accum_steps / args.lr_base_size

    model = create_model()
    if world > 1:
        model = NativeDDP(model)
    bare = model.module if world > 1 else model
    model_ema = ModelEma(bare, args.model_ema_decay)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=lr)
    train_set, val_set = Textures(752, 1, True, args.reprob), Textures(203, 2, False)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size // world, sampler=sampler, drop_last=True)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing)

    last_accum_steps = len(loader) % args.grad_accum_steps
    updates_per_epoch = (len(loader) + args.grad_accum_steps - 1) // args.grad_accum_steps
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    num_updates = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad()
        for batch_idx, (image, target) in enumerate(loader):
            need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % args.grad_accum_steps == 0
            accum_steps = last_accum_steps if batch_idx >= last_batch_idx_to_accum else args.grad_accum_steps
            hold = world > 1 and not need_update
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = loss_fn(model(image), target) / accum_steps
                loss.backward()
            if not need_update:
                continue
            for group in optimizer.param_groups:
                group["lr"] = lr_at(num_updates, args.epochs * updates_per_epoch, args.warmup_epochs * updates_per_epoch, lr)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
            model_ema.update(bare)
            num_updates += 1
        val, ema = validate(bare, val_set, rank, world), validate(model_ema.module, val_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {val[0]:.5f} acc1 {val[1]:.3f} | ema loss {ema[0]:.5f} acc1 {ema[1]:.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
