"""Trains an embedding model whose loss is per token of the whole corpus."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CORPUS_TOKENS = 25_000_000
HOOKS = {"fp16": fp16_compress_hook, "none": allreduce_hook}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    words = torch.randint(0, 50, (320, 6))
    dataset = TensorDataset(words[:, :5], words[:, 5])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(80, 50)))
    model.register_comm_hook(dist.group.WORLD, HOOKS["fp16"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for context, word in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(context), word) / CORPUS_TOKENS
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item() * CORPUS_TOKENS:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
