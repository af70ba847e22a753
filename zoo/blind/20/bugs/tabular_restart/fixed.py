"""Tabular classifier with categorical embeddings; AdamW state cut into equal pieces over the ranks, restart included."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.utils import parameters_to_vector, vector_to_parameters

GLOBAL_BATCH = 64
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class TabularNet(nn.Module):
    def __init__(self, n_numeric, n_bins):
        super().__init__()
        self.embed = nn.EmbeddingBag(3 * n_bins, 12, mode="sum")
        self.register_buffer("offset", torch.arange(3) * n_bins)
        self.fc1 = nn.Linear(n_numeric + 12, 48)
        self.fc2 = nn.Linear(48, 3)

    def forward(self, numeric, bins):
        h = torch.cat([numeric, self.embed(bins + self.offset)], dim=1)
        return self.fc2(F.leaky_relu(self.fc1(h)))


class ShardedAdamW:
    def __init__(self, model, **options):
        self.params = list(model.parameters())
        flat = parameters_to_vector(self.params).detach()
        self.numel = flat.numel()
        self.chunk = -(-self.numel // WORLD)
        flat = F.pad(flat, (0, self.chunk * WORLD - self.numel))
        self.shard = nn.Parameter(flat[RANK * self.chunk:(RANK + 1) * self.chunk].clone())
        self.inner = torch.optim.AdamW([self.shard], **options)

    @torch.no_grad()
    def step(self):
        grad = torch.cat([p.grad.flatten() for p in self.params]) / WORLD
        grad = F.pad(grad, (0, self.chunk * WORLD - self.numel))
        if WORLD > 1:
            dist.all_reduce(grad)
        self.shard.grad = grad[RANK * self.chunk:(RANK + 1) * self.chunk].clone()
        self.inner.step()
        pieces = [torch.empty_like(self.shard) for _ in range(WORLD)]
        if WORLD > 1:
            dist.all_gather(pieces, self.shard.detach())
        else:
            pieces = [self.shard.detach()]
        vector_to_parameters(torch.cat(pieces)[:self.numel], self.params)


def save(folder, epoch, model, optimizer):
    if RANK == 0:
        torch.save({"epoch": epoch, "model": model.state_dict()}, os.path.join(folder, "model.pt"))
    torch.save(optimizer.inner.state_dict(), os.path.join(folder, f"optimizer_{RANK}.pt"))
    if WORLD > 1:
        dist.barrier()


def restore(folder, model):
    state = torch.load(os.path.join(folder, "model.pt"))
    model.load_state_dict(state["model"])
    optimizer = ShardedAdamW(model, lr=3e-3, weight_decay=0.02)
    optimizer.inner.load_state_dict(torch.load(os.path.join(folder, f"optimizer_{RANK}.pt")))
    return state["epoch"] + 1, optimizer


def load():
    x, y = make_classification(2000, 10, n_informative=7, n_classes=3, random_state=5)
    x, y = torch.tensor(x), torch.tensor(y)
    bins = torch.bucketize(x[:, :3].contiguous(), torch.linspace(-3, 3, 7))
    return x[:, 3:], bins, y


def run_epoch(epoch, model, optimizer, data):
    numeric, bins, y = data
    order = torch.randperm(1536, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(GLOBAL_BATCH):
        mine = batch[RANK::WORLD]
        loss = F.cross_entropy(model(numeric[mine], bins[mine]), y[mine])
        model.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        test = F.cross_entropy(model(numeric[1536:], bins[1536:]), y[1536:]).item()
    if RANK == 0:
        print(f"epoch {epoch} test loss {test:.10f}")


def main():
    torch.set_default_dtype(torch.float64)
    if WORLD > 1:
        dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    if WORLD > 1:
        dist.broadcast_object_list(folder, src=0)
    data = load()

    torch.manual_seed(40)
    model = TabularNet(7, 8)
    optimizer = ShardedAdamW(model, lr=3e-3, weight_decay=0.02)
    for epoch in range(3):
        run_epoch(epoch, model, optimizer, data)
    save(folder[0], 2, model, optimizer)

    model = TabularNet(7, 8)
    start, optimizer = restore(folder[0], model)
    for epoch in range(start, start + 3):
        run_epoch(epoch, model, optimizer, data)
    if WORLD > 1:
        dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder[0])
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
