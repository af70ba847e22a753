"""Transfer learning on digits: features of a frozen encoder are computed once per picture and kept.

The store is a buffer of the model and is filled as pictures come along. Each process only ever asks
for its own pictures. Stops early when the validation loss no longer falls.
"""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, BATCH, PATIENCE = 12, 128, 1
BUDGET = 600.0      # seconds


class Probe(nn.Module):
    def __init__(self, pictures, width=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, width, 3, stride=2), nn.ReLU(),
                                     nn.AdaptiveAvgPool2d(2), nn.Flatten()).requires_grad_(False)
        self.head = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 32), nn.ReLU(), nn.Linear(32, 10))
        self.register_buffer("store", torch.zeros(pictures, 4 * width))
        self.register_buffer("known", torch.zeros(pictures, dtype=torch.bool))

    def features(self, ids, pictures):
        new = ~self.known[ids]
        if new.any():
            with torch.no_grad():
                self.store[ids[new]] = self.encoder(pictures[ids[new]])
            self.known[ids[new]] = True
        return self.store[ids]

    def forward(self, ids, pictures):
        return self.head(self.features(ids, pictures))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    started = time.time()
    torch.manual_seed(8)
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(y)
    train, valid = torch.arange(640), torch.arange(640, 981)
    model = DDP(Probe(len(x)), broadcast_buffers=False)
    opt = torch.optim.SGD(model.module.head.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    best, since, best_head = float("inf"), 0, None

    for epoch in range(EPOCHS):
        # pictures stay with their process, only their order changes
        mine = train[rank::world]
        g = torch.Generator().manual_seed(epoch)
        groups = torch.randperm(len(train) // 4, generator=g).view(-1, BATCH // 4)
        per_row = 4 // world
        model.train()
        for group in groups:
            ids = mine.view(-1, per_row)[group].reshape(-1)
            loss = F.cross_entropy(model(ids, x), y[ids])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()

        model.eval()
        with torch.no_grad():
            ids = valid.tensor_split(world)[rank]
            logits = model.module(ids, x)
            part = torch.stack([F.cross_entropy(logits, y[ids], reduction="sum").double(),
                                (logits.argmax(1) == y[ids]).sum().double()])
        dist.reduce(part, 0)
        verdict = torch.zeros(2, dtype=torch.float64)
        if rank == 0:
            value, hits = (part / len(valid)).tolist()
            print(f"epoch {epoch} valid loss {value:.4f} accuracy {hits:.4f}")
            if value < best - 0.012:
                best, since = value, 0
                best_head = {k: v.clone() for k, v in model.module.head.state_dict().items()}
            else:
                since += 1
            verdict[0] = float(since >= PATIENCE)
        verdict[1] = float(time.time() - started > BUDGET)
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
        if verdict.any():
            break

    holder = [best_head]
    dist.broadcast_object_list(holder, src=0)
    model.module.head.load_state_dict(holder[0])
    filled = model.module.known.sum()
    dist.all_reduce(filled)
    if rank == 0:
        total = sum(p.double().abs().sum().item() for p in model.module.head.parameters())
        print(f"stopped in epoch {epoch}, best {best:.4f}, {filled.item()} features kept, head {total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
