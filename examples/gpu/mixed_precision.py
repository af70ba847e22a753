"""Automatic mixed precision in float16: autocast, GradScaler, clipping after unscale_, accumulation under no_sync.

samestep run -n 2 --fake-gpus examples/gpu/mixed_precision.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from data import digits


def main():
    """Takes twelve steps of two micro-batches each."""
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    model = DistributedDataParallel(model, device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    images, labels = (tensor.pin_memory() for tensor in digits().tensors)
    losses = []
    for step in range(12):
        optimizer.zero_grad(set_to_none=True)
        for part in range(2):
            mine = slice(((2 * step + part) * size + rank) * 32, ((2 * step + part) * size + rank + 1) * 32)
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                with torch.autocast("cuda", dtype=torch.float16):
                    logits = model(images[mine].cuda(non_blocking=True))
                    loss = nn.functional.cross_entropy(logits, labels[mine].cuda(non_blocking=True)) / 2
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() * 2)
    if rank == 0:
        print(f"logits in {logits.dtype}; loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
