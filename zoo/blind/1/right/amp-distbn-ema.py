"""Reference-style image trainer: autocast + GradScaler, BatchNorm with local statistics averaged at the end of an epoch, weight EMA."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    p = argparse.ArgumentParser("train")
    p.add_argument("-b", "--batch-size", type=int, default=32)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr-base", type=float, default=0.05, help="learning rate for a global batch of 64")
    p.add_argument("--clip-grad", type=float, default=2.0)
    p.add_argument("--no-amp", dest="amp", action="store_false")
    return p.parse_args()


class ConvNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width * 2, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(width * 2)
        self.head = nn.Linear(width * 2, 10)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((-1, -2)))


def reduce_tensor(t, n):
    rt = t.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    return rt / n


def distribute_bn(model, world_size):
    for name, buf in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buf, op=dist.ReduceOp.SUM)
            buf /= float(world_size)


def train_one_epoch(epoch, model, loader, optimizer, scheduler, scaler, ema, args, rank):
    model.train()
    start = time.time()
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        ema.update_parameters(model.module)
        if i % 8 == 0:
            shown = reduce_tensor(loss.detach(), dist.get_world_size())
            if rank == 0:
                print(f"Train: {epoch} [{i:>3d}/{len(loader)}] loss {shown.item():.4f} lr {scheduler.get_last_lr()[0]:.4f} "
                      f"scale {scaler.get_scale():.0f} ({time.time() - start:.1f}s)", flush=True)


@torch.no_grad()
def validate(model, x, y, rank, world):
    model.eval()
    xs, ys = x[rank::world], y[rank::world]
    out = model(xs)
    stat = torch.stack([(out.argmax(1) == ys).sum().double(), nn.functional.cross_entropy(out, ys, reduction="sum").double(),
                        torch.tensor(float(len(ys)), dtype=torch.double)])
    dist.all_reduce(stat)
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def main():
    args = get_args()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)
    raw = load_digits()
    x = torch.as_tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.as_tensor(raw.target)
    train_set = TensorDataset(x[:1024], y[:1024])
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = NativeDDP(ConvNet())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    global_batch = args.batch_size * world
    lr = args.lr_base * global_batch / 64
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=args.epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, enabled=args.amp)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader, optimizer, scheduler, scaler, ema, args, rank)
        distribute_bn(model.module, world)
        for e, m in zip(ema.module.buffers(), model.module.buffers()):
            e.copy_(m)
        acc, loss = validate(model.module, x[1024:], y[1024:], rank, world)
        acc_ema, loss_ema = validate(ema.module, x[1024:], y[1024:], rank, world)
        if rank == 0:
            print(f"Test: {epoch} acc {acc:.4f} loss {loss:.4f} | ema acc {acc_ema:.4f} loss {loss_ema:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
