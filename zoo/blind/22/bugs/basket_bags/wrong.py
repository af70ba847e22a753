"""Next-purchase prediction from shopping baskets; large item table with sparse gradients."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

ITEMS, AISLES = 800, 20
BASKETS, BATCH, EPOCHS = 960, 48, 3


def make_baskets():
    g = torch.Generator().manual_seed(13)
    baskets, targets = [], []
    aisle_of = torch.randint(0, AISLES, (ITEMS,), generator=g)
    by_aisle = [torch.nonzero(aisle_of == a).flatten() for a in range(AISLES)]
    for _ in range(BASKETS):
        main_aisle = int(torch.randint(0, AISLES, (1,), generator=g))
        size = int(torch.randint(3, 12, (1,), generator=g))
        pool = by_aisle[main_aisle]
        own = pool[torch.randint(0, len(pool), (size,), generator=g)]
        other = torch.randint(0, ITEMS, (size // 3,), generator=g)
        baskets.append(torch.cat([own, other]))
        targets.append(main_aisle)
    return baskets, torch.tensor(targets)


class BasketNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, dim, mode="mean", sparse=True)
        self.hidden = nn.Linear(dim, 48)
        self.out = nn.Linear(48, AISLES)

    def forward(self, flat, offsets):
        return self.out(torch.tanh(self.hidden(self.items(flat, offsets))))


def pad_gather(t, longest, world):
    padded = t.new_zeros((longest,) + t.shape[1:])
    padded[:len(t)] = t
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return parts


def combine_sparse(grad, world):
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(rows)]))
    sizes = [int(s) for s in sizes]
    longest = max(sizes)
    all_rows = [part[:n] for part, n in zip(pad_gather(rows, longest, world), sizes)]
    all_values = [part[:n] for part, n in zip(pad_gather(values, longest, world), sizes)]
    index, data = torch.cat(all_rows).unsqueeze(0), torch.cat(all_values)
    return torch.sparse_coo_tensor(index, data, grad.shape, check_invariants=True).coalesce()


def sync_gradients(model, world):
    for p in model.parameters():
        if p.grad.is_sparse:
            p.grad = combine_sparse(p.grad, world)
        else:
            dist.all_reduce(p.grad)
            p.grad /= world


def collate(baskets):
    lengths = torch.tensor([0] + [len(b) for b in baskets[:-1]])
    return torch.cat(baskets), lengths.cumsum(0)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    baskets, targets = make_baskets()
    torch.manual_seed(30)
    model = BasketNet()
    optimizer = torch.optim.SGD([
        {"params": model.items.parameters(), "lr": 20.0},
        {"params": list(model.hidden.parameters()) + list(model.out.parameters()), "lr": 0.4},
    ])

    for epoch in range(EPOCHS):
        order = torch.randperm(BASKETS, generator=torch.Generator().manual_seed(epoch)).tolist()
        stats = torch.zeros(2)
        for start in range(0, BASKETS, BATCH):
            mine = order[start:start + BATCH][rank::world]
            flat, offsets = collate([baskets[i] for i in mine])
            logits = model(flat, offsets)
            loss = F.cross_entropy(logits, targets[mine])
            optimizer.zero_grad()
            loss.backward()
            sync_gradients(model, world)
            optimizer.step()
            stats[0] += loss.detach() * len(mine)
            stats[1] += (logits.argmax(1) == targets[mine]).sum()
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / BASKETS:.6f} top-1 {stats[1] / BASKETS:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
