"""Search in a herbarium: self-supervised leaf embeddings, judged by how often the nearest other leaf is of the same species."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
SPECIES, SHAPE, BATCH, EPOCHS = 24, 20, 64, 4


class LeafNet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SHAPE, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, dim), nn.LayerNorm(dim))
        self.guess = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, one, two):
        a, b = self.trunk(one), self.trunk(two)
        toward_b = F.cosine_similarity(self.guess(a), b.detach()).mean()
        toward_a = F.cosine_similarity(self.guess(b), a.detach()).mean()
        return -(toward_a + toward_b) / 2


def leaves(n, seed):
    g = torch.Generator().manual_seed(77)
    outline = torch.randn(SPECIES, SHAPE, generator=g)
    g.manual_seed(seed)
    species = torch.randint(0, SPECIES, (n,), generator=g)
    return outline[species] + 1.1 * torch.randn(n, SHAPE, generator=g), species


def views(leaf, step, part):
    """Two noisy views; the noise belongs to the place in the global batch."""
    g = torch.Generator().manual_seed(10_000 + step)
    noise = 0.5 * torch.randn(2, BATCH, SHAPE, generator=g)[:, part]
    hidden = torch.rand(2, BATCH, SHAPE, generator=g)[:, part] < 0.15
    return (leaf + noise).masked_fill(hidden, 0.0)


def gather(x):
    if not dist.is_initialized():
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def same_species_first(net, leaf, species, rank, world):
    mine = torch.arange(rank, len(leaf), world)
    query = F.normalize(net.trunk(leaf[mine]), dim=1)
    gallery, owner = gather(query), gather(mine)
    near = query @ gallery.T
    near[mine[:, None] == owner[None]] = -2
    hits = species[owner[near.argmax(1)]] == species[mine]
    return gather(hits.double().sum()[None]).sum().item() / len(leaf)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    net = LeafNet()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    leaf, _ = leaves(1024, 1)
    test, species = leaves(480, 2)
    step = 0
    share = BATCH // world
    part = slice(rank * share, (rank + 1) * share)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(leaf), generator=torch.Generator().manual_seed(epoch))
        losses = []
        for batch in order.split(BATCH):
            one, two = views(leaf[batch[part]], step, part)
            loss = model(one, two)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
            step += 1
        mean = gather(torch.stack(losses)).mean()
        found = same_species_first(net, test, species, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {mean:.8f} same species first {found:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
