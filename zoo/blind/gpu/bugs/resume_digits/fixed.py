"""Convolutional digit classifier, stopped half-way and resumed from its checkpoint."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES = 8
BATCH = 48
FIRST_RUN, SECOND_RUN = 16, 16


def glyphs(n, seed):
    base = torch.rand(CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(40)).gt(0.6).float()
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    x = base[y] + 0.6 * torch.randn(n, 1, 16, 16, generator=g)
    return x, y


class GlyphNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, CLASSES),
        )


def build(device):
    torch.manual_seed(9)
    net = GlyphNet().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4, foreach=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=6)
    return net, optimizer, scaler


def save(path, net, optimizer, scaler, step):
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(), "step": step}, path)


def resume(path, net, optimizer, scaler, device, rank):
    state = torch.load(path, map_location=device, weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    if rank == 0:
        print(f"resumed at step {state['step']} with scale {scaler.get_scale():.0f}")
    return state["step"]


def train(net, optimizer, scaler, x, y, begin, end, rank, world, device):
    model = DDP(net, device_ids=[device.index]) if world > 1 else net
    window = torch.zeros((), device=device)
    for step in range(begin, end):
        g = torch.Generator().manual_seed(1000 + step)
        idx = torch.randint(0, len(x), (BATCH,), generator=g)[rank::world]
        images = x[idx].pin_memory().to(device, non_blocking=True)
        labels = y[idx].pin_memory().to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        window += loss.detach()
        if (step + 1) % 8 == 0:
            if world > 1:
                dist.all_reduce(window)
            if rank == 0:
                print(f"step {step + 1} loss {window.item() / 8 / world:.4f}")
            window.zero_()


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
        dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "last.pt")

    x, y = glyphs(960, seed=41)
    net, optimizer, scaler = build(device)
    train(net, optimizer, scaler, x, y, 0, FIRST_RUN, rank, world, device)
    if rank == 0:
        save(path, net, optimizer, scaler, FIRST_RUN)
    if world > 1:
        dist.barrier()
    del net, optimizer, scaler

    net, optimizer, scaler = build(device)
    step = resume(path, net, optimizer, scaler, device, rank)
    train(net, optimizer, scaler, x, y, step, step + SECOND_RUN, rank, world, device)

    test_x, test_y = (t[rank::world].to(device) for t in glyphs(240, seed=42))
    with torch.no_grad():
        correct = (net(test_x).argmax(dim=1) == test_y).sum()
    if world > 1:
        dist.all_reduce(correct)
    if rank == 0:
        print(f"test accuracy {correct.item() / 240:.4f}")
        shutil.rmtree(folder[0])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
