"""Regression on small molecule-like graphs; a batch is dealt out so that every process gets about as many edges.

The sampler sorts the graphs of a batch by size and gives the next one to the process with the least work
(longest processing time first), so processes get unequal numbers of graphs.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

GRAPHS, TEST, BATCH, EPOCHS, KINDS = 320, 77, 40, 4, 6


class Graphs(Dataset):
    """Rings with tails. The target depends on atoms and on how many neighbours they have."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            ring = int(torch.randint(3, 8, (1,), generator=g))
            tail = int(torch.randint(0, 14, (1,), generator=g))
            nodes = ring + tail
            pairs = [(i, (i + 1) % ring) for i in range(ring)]
            for t in range(ring, nodes):
                pairs.append((t, int(torch.randint(t, (1,), generator=g))))
            edges = torch.tensor(pairs).t()
            edges = torch.cat([edges, edges.flip(0)], 1)
            kind = torch.randint(KINDS, (nodes,), generator=g)
            degree = torch.bincount(edges[1], minlength=nodes)
            target = ((kind - 2.5) * (degree - 2)).float().mean() + 0.3 * (ring == 6) + 0.1 * (kind == 3).sum() / nodes
            self.items.append((kind, edges, target))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def pack(items):
    kinds, edges, where, targets, at = [], [], [], [], 0
    for k, (kind, edge, target) in enumerate(items):
        kinds.append(kind)
        edges.append(edge + at)
        where.append(torch.full((len(kind),), k))
        targets.append(target)
        at += len(kind)
    return torch.cat(kinds), torch.cat(edges, 1), torch.cat(where), torch.stack(targets)


class BalancedBatches:
    def __init__(self, data, batch, rank, world, seed=0):
        self.cost = [e.shape[1] for _, e, _ in data.items]
        self.batch, self.rank, self.world, self.seed = batch, rank, world, seed
        self.epoch = -1

    def __len__(self):
        return len(self.cost) // self.batch

    def __iter__(self):
        self.epoch += 1
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.cost), generator=g).tolist()
        for b in range(len(self)):
            hand, load = [[] for _ in range(self.world)], [0] * self.world
            for i in sorted(order[b * self.batch:(b + 1) * self.batch], key=lambda i: -self.cost[i]):
                r = load.index(min(load))
                hand[r].append(i)
                load[r] += self.cost[i]
            yield hand[self.rank]


class GIN(nn.Module):
    def __init__(self, width=32, layers=3):
        super().__init__()
        self.atoms = nn.Embedding(KINDS, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(layers))
        self.eps = nn.Parameter(torch.zeros(layers))
        self.out = nn.Linear(width, 1)

    def forward(self, kinds, edges, where, graphs):
        h = self.atoms(kinds)
        for k, layer in enumerate(self.layers):
            around = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            h = h + layer((1 + self.eps[k]) * h + around)
        pooled = h.new_zeros(graphs, h.shape[1]).index_add(0, where, h)
        size = torch.bincount(where, minlength=graphs).clamp(min=1)
        return self.out(pooled / size[:, None]).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    train, test = Graphs(GRAPHS, seed=1), Graphs(TEST, seed=2)
    loader = DataLoader(train, batch_sampler=BalancedBatches(train, BATCH, rank, world), collate_fn=pack)
    net = DDP(GIN())
    opt = torch.optim.RAdam(net.parameters(), lr=5e-3)
    swa = torch.optim.swa_utils.AveragedModel(net.module)

    for epoch in range(EPOCHS):
        total = torch.zeros(2, dtype=torch.float64)
        for kinds, edges, where, y in loader:
            loss = (net(kinds, edges, where, len(y)) - y).square().sum()
            opt.zero_grad()
            (loss * (world / BATCH)).backward()
            opt.step()
            total += torch.tensor([loss.item(), len(y)], dtype=torch.float64)
        if epoch >= 2:
            swa.update_parameters(net.module)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {total[0] / total[1]:.4f} graphs {int(total[1])}")

    mine = list(range(TEST))[rank::world]
    kinds, edges, where, y = pack([test[i] for i in mine])
    with torch.no_grad():
        err = torch.stack([(m(kinds, edges, where, len(y)) - y).abs().double().sum() for m in (net.module, swa)])
    dist.all_reduce(err)
    if rank == 0:
        print("test mae {:.4f} averaged weights {:.4f}".format(*(err / TEST).tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
