"""Image classifier fed by a prefetcher that copies and normalises on its own CUDA stream."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, BATCH, EPOCHS = 6, 48, 3


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    angle = y.view(n, 1, 1) * torch.pi / CLASSES + 0.1 * torch.randn(n, 1, 1, generator=g)
    grid = torch.arange(24.0)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    wave = torch.sin(0.9 * (xx * angle.cos() + yy * angle.sin()) + phase)
    image = 128 + 50 * wave.unsqueeze(1) + 25 * torch.randn(n, 3, 24, 24, generator=g)
    return TensorDataset(image.clamp(0, 255).to(torch.uint8), y)


class Prefetcher:
    def __init__(self, loader, device):
        self.source = iter(loader)
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.advance()

    def advance(self):
        try:
            x, y = next(self.source)
        except StopIteration:
            self.ready = None
            return
        with torch.cuda.stream(self.stream):
            x = x.to(self.device, non_blocking=True)
            x = x.float().sub_(128).div_(50).contiguous(memory_format=torch.channels_last)
            self.ready = x, y.to(self.device, non_blocking=True)

    def __iter__(self):
        while self.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            x, y = self.ready
            x.record_stream(current)
            y.record_stream(current)
            self.advance()
            yield x, y


def layer(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=2, padding=1, bias=False), nn.GroupNorm(4, cout), nn.ReLU(inplace=True)
    )


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(95)

    train = textures(480, seed=96)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=7)
    loader = DataLoader(train, BATCH // world, sampler=sampler, pin_memory=True, drop_last=True)
    net = nn.Sequential(layer(3, 24), layer(24, 48), layer(48, 48), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, CLASSES))
    net = net.to(device, memory_format=torch.channels_last)
    model = net
    if world > 1:
        model = DDP(net, device_ids=[device.index], static_graph=True, gradient_as_bucket_view=True)
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=512.0, growth_interval=10)

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(2, device=device)
        begin.record()
        for x, y in Prefetcher(loader, device):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            running += torch.stack([loss.detach() * len(y), (logits.argmax(dim=1) == y).sum().float()])
        end.record()
        if world > 1:
            dist.all_reduce(running)
        summary = running.to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        if rank == 0:
            peak = torch.cuda.max_memory_allocated(device) / 2 ** 20
            print(f"epoch {epoch} loss {summary[0].item() / len(train):.4f} accuracy {summary[1].item() / len(train):.4f} "
                  f"scale {scaler.get_scale():.0f} [{begin.elapsed_time(end):.0f} ms, {peak:.0f} MiB]")
            torch.cuda.reset_peak_memory_stats(device)

    images, labels = (t[rank::world].to(device) for t in textures(240, seed=97).tensors)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        correct = (net((images.float() - 128) / 50).argmax(dim=1) == labels).sum()
    if world > 1:
        dist.all_reduce(correct)
    if rank == 0:
        print(f"test accuracy {correct.item() / 240:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
