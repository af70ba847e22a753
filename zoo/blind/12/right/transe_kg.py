"""TransE on a made-up family of triples: margin ranking, entities kept on the unit sphere, filtered ranks on the test triples."""
import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def triples(entities, relations, seed):
    rng = np.random.default_rng(seed)
    where = rng.normal(size=(entities, 3))
    found = []
    for r in range(relations):
        goal = where + rng.normal(size=3) * 0.8
        gap = ((goal[:, None] - where[None]) ** 2).sum(-1) + 9.0 * np.eye(entities)
        for h in range(entities):
            found += [(h, r, t) for t in np.argsort(gap[h])[:2]]
    return np.array(found)[rng.permutation(len(found))]


class TransE(nn.Module):
    def __init__(self, entities, relations, dim):
        super().__init__()
        self.entity, self.relation = nn.Embedding(entities, dim), nn.Embedding(relations, dim)
        bound = 6 / dim ** 0.5
        nn.init.uniform_(self.entity.weight, -bound, bound)
        nn.init.uniform_(self.relation.weight, -bound, bound)
        with torch.no_grad():
            self.relation.weight.copy_(F.normalize(self.relation.weight, dim=1))
        self.renormalize()

    @torch.no_grad()
    def renormalize(self):
        self.entity.weight.div_(self.entity.weight.norm(dim=1, keepdim=True))

    def forward(self, h, r, t):
        return (self.entity(h) + self.relation(r) - self.entity(t)).square().sum(-1)


def corrupt(batch, entities, rng):
    wrong = batch.copy()
    side = rng.random(len(batch)) < 0.5
    other = rng.integers(entities, size=len(batch))
    wrong[side, 0], wrong[~side, 2] = other[side], other[~side]
    return wrong


@torch.no_grad()
def mean_reciprocal_rank(net, test, known, entities, rank, world):
    score = torch.zeros(2, dtype=torch.float64)
    everyone = torch.arange(entities)
    for h, r, t in test[rank::world]:
        d = net(torch.tensor(h), torch.tensor(r), everyone)
        mask = torch.tensor([(h, r, e) in known and e != t for e in range(entities)])
        place = 1 + (d.masked_fill(mask, float("inf")) < d[t]).sum()
        score += torch.tensor([1 / place.item(), float(place <= 10)])
    if world > 1:
        dist.reduce(score, dst=0)
    return (score / len(test)).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--entities", type=int, default=80)
    parser.add_argument("--relations", type=int, default=5)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=90)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(12)
    rng = np.random.default_rng(12)
    data = triples(args.entities, args.relations, seed=4)
    train, test, known = data[:-90], data[-90:], set(map(tuple, data))
    net = TransE(args.entities, args.relations, args.dim)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1, eps=1e-6)
    for epoch in range(args.epochs):
        train = rng.permutation(train)
        total = torch.zeros(())
        for start in range(0, len(train), args.batch):
            batch = train[start: start + args.batch]
            wrong = corrupt(batch, args.entities, rng)
            right_part, wrong_part = (torch.tensor(np.array_split(a, world)[rank]) for a in (batch, wrong))
            loss = F.relu(args.margin + net(*right_part.T) - net(*wrong_part.T)).sum()
            optimizer.zero_grad()
            loss.backward()
            if world > 1:
                for p in net.parameters():
                    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            for p in net.parameters():
                p.grad.div_(len(batch))
            optimizer.step()
            net.renormalize()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        mrr, hits = mean_reciprocal_rank(net, test, known, args.entities, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(train):.5f} MRR {mrr:.4f} hits@10 {hits:.4f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
