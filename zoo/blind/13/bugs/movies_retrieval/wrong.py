"""Two-tower retrieval: softmax over the catalogue in training, recall of the next film with a split catalogue."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FILMS, TASTES = 144, 6


def histories(count, seed, length=6):
    g = torch.Generator().manual_seed(seed)
    film = torch.randn(FILMS, TASTES, generator=g)
    viewer = 1.5 * torch.randn(count, TASTES, generator=g)
    chance = torch.softmax(viewer @ film.T, dim=1)
    seen = torch.multinomial(chance, length + 1, generator=g)
    return seen[:, :-1], seen[:, -1]


class Towers(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.film = nn.Embedding(FILMS, width)
        self.viewer = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))

    def query(self, seen):
        return self.viewer(self.film(seen).mean(dim=1))

    def forward(self, seen):
        return self.query(seen) @ self.film.weight.T


@torch.no_grad()
def recall(net, seen, target, k):
    """Every process searches its part of the catalogue; the best k of all parts are kept."""
    rank, world = dist.get_rank(), dist.get_world_size()
    films = net.film.weight.chunk(world)[rank]
    value, index = (net.query(seen) @ films.T).topk(k, dim=1)
    values = [torch.empty_like(value) for _ in range(world)]
    indices = [torch.empty_like(index) for _ in range(world)]
    dist.all_gather(values, value)
    dist.all_gather(indices, index)
    value, index = torch.cat(values, dim=1), torch.cat(indices, dim=1)
    best = index.gather(1, value.topk(k, dim=1).indices)
    return (best == target[:, None]).any(dim=1).float().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--k", type=int, default=10)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    seen, target = histories(896, seed=20)
    net = Towers()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)

    for epoch in range(args.epochs):
        total = torch.zeros(())
        order = torch.randperm(640, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(args.batch):
            rows = rows[rank::world]
            loss = F.cross_entropy(model(seen[rows]), target[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(rows)
        dist.all_reduce(total)
        found = recall(net, seen[640:], target[640:], args.k)
        if rank == 0:
            print(f"epoch {epoch} loss {total / 640:.5f} recall@{args.k} {found:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
