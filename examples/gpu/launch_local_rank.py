"""One process per GPU, as scripts for torch.distributed.launch are written: `--local_rank`, env://, NCCL, DDP.

samestep run -n 2 --fake-gpus --pass-local_rank examples/gpu/launch_local_rank.py
samestep verify --fake-gpus --pass-local_rank examples/gpu/launch_local_rank.py

On GPUs: `samestep run --pass-local_rank examples/gpu/launch_local_rank.py`, a process for each.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from data import digits


def main():
    """Trains two epochs; rank 0 prints the mean loss of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    local_rank = parser.parse_args().local_rank
    torch.cuda.set_device(local_rank)  # before the first collective: bare "cuda" is this GPU from here on
    dist.init_process_group(backend="nccl", init_method="env://")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = digits()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler, pin_memory=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device="cuda")
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device="cuda")])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}: mean loss {(total[0] / total[1]).item():.3f} on {torch.cuda.device_count()} GPUs"
            )
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
