"""Knowledge-graph embeddings (TransE) with sampled negatives and hand-written gradient averaging."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ENTITIES, RELATIONS, DIM = 80, 5, 16
GLOBAL_BATCH, NEGATIVES, EPOCHS = 40, 6, 4
MARGIN = 1.0


def make_triples():
    """Entities sit on a ring; a relation moves along it."""
    g = torch.Generator().manual_seed(37)
    head = torch.randint(0, ENTITIES, (480,), generator=g)
    relation = torch.randint(0, RELATIONS, (480,), generator=g)
    tail = (head + torch.tensor([1, 3, 7, 20, 40])[relation]) % ENTITIES
    return torch.stack([head, relation, tail], dim=1)


class TransE(nn.Module):
    def __init__(self):
        super().__init__()
        self.entity = nn.Embedding(ENTITIES, DIM)
        self.relation = nn.Embedding(RELATIONS, DIM)
        nn.init.xavier_uniform_(self.entity.weight)
        nn.init.xavier_uniform_(self.relation.weight)

    def distance(self, head, relation, tail):
        h = F.normalize(self.entity(head), dim=-1)
        t = F.normalize(self.entity(tail), dim=-1)
        return (h + self.relation(relation) - t).square().sum(-1)

    def forward(self, triples, negatives):
        head, relation, tail = triples.unbind(1)
        good = self.distance(head, relation, tail)
        bad = self.distance(head[:, None], relation[:, None], negatives)
        return F.relu(MARGIN + good[:, None] - bad).mean()


class NegativeSampler:
    """Replacement tails for every triple of a batch; the same seed gives the same run."""

    def __init__(self, seed, rank, world):
        self.seed, self.rank, self.world = seed, rank, world

    def __call__(self, step):
        g = torch.Generator().manual_seed(self.seed + step)
        return torch.randint(0, ENTITIES, (GLOBAL_BATCH // self.world, NEGATIVES), generator=g)


@torch.no_grad()
def mean_rank(model, triples, rank, world):
    head, relation, tail = triples[rank::world].unbind(1)
    candidates = torch.arange(ENTITIES)[None, :]
    distance = model.distance(head[:, None], relation[:, None], candidates)
    true = distance.gather(1, tail[:, None])
    total = (distance < true).sum().double() + len(head)
    if world > 1:
        dist.all_reduce(total)
    return total.item() / len(triples)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    triples = make_triples()
    torch.manual_seed(0)
    model = TransE().double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sampler = NegativeSampler(500, rank, world)

    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(len(triples), generator=torch.Generator().manual_seed(epoch))
        running = torch.zeros((), dtype=torch.float64)
        for batch in order.split(GLOBAL_BATCH):
            loss = model(triples[batch[rank::world]], sampler(step))
            optimizer.zero_grad()
            loss.backward()
            if world > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
            optimizer.step()
            running += loss.detach()
            step += 1
        if world > 1:
            dist.all_reduce(running)
        score = mean_rank(model, triples, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / world / 12:.8f} mean rank {score:.4f}")

    if rank == 0:
        print(f"weight norm {sum(p.detach().square().sum() for p in model.parameters()).item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
