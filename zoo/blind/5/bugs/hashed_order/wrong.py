import argparse
import json
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

ROOT = pathlib.Path(json.__file__).parent
BLOCK = 40


def read_blocks():
    """{key: bytes} for the json package, cut into blocks of BLOCK + 1 characters."""
    blocks = {}
    for path in sorted(ROOT.glob("*.py")):
        raw = path.read_bytes()
        for n, at in enumerate(range(0, len(raw) - BLOCK - 1, BLOCK)):
            blocks[f"{path.stem}/{n:04d}"] = raw[at:at + BLOCK + 1]
    return blocks


class BlockStream(IterableDataset):
    """Streams blocks in an order that changes with the epoch and needs no stored permutation."""

    def __init__(self, blocks, global_batch, rank, world):
        self.blocks = blocks
        self.global_batch = global_batch
        self.share = global_batch // world
        self.rank = rank
        self.epoch = 0

    def order(self):
        return sorted(self.blocks, key=lambda name: hash(f"{self.epoch}:{name}"))

    def __iter__(self):
        names = self.order()
        usable = len(names) - len(names) % self.global_batch
        for at in range(0, usable, self.global_batch):
            first = at + self.rank * self.share
            for name in names[first:first + self.share]:
                yield torch.tensor(list(self.blocks[name])).clamp(max=127)
        self.epoch += 1


class CausalConv(nn.Module):
    def __init__(self, dim, kernel=3):
        super().__init__()
        self.pad = kernel - 1
        self.conv = nn.Conv1d(dim, dim, kernel)

    def forward(self, x):
        return x + torch.relu(self.conv(nn.functional.pad(x, (self.pad, 0))))


class ByteModel(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(128, dim)
        self.layers = nn.Sequential(*[CausalConv(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, 128)

    def forward(self, tokens):
        return self.out(self.layers(self.embed(tokens).transpose(1, 2)).transpose(1, 2))


def average_gradients(model, world):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--global-batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=3e-3)
    opt = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(11)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=opt.lr, eps=1e-6)
    stream = BlockStream(read_blocks(), opt.global_batch, rank, world)
    loader = DataLoader(stream, batch_size=stream.share)

    step = 0
    for epoch in range(opt.epochs):
        for tokens in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
            step += 1
            if step % 8 == 0:
                shown = loss.detach() / world
                dist.all_reduce(shown)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {shown.item():.4f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()
