"""Two-tower retrieval with FSDP2. Queries and documents are encoded by methods of the model, not by forward."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.nn.functional import all_gather

QUERY_WORDS, DOC_WORDS, TOPICS, WIDTH = 60, 90, 24, 32
BATCH, STEPS = 48, 32


class Tower(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.bag = nn.EmbeddingBag(words, WIDTH, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, words):
        h = self.bag(words)
        return F.normalize(h + self.mlp(h), dim=1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = Tower(QUERY_WORDS), Tower(DOC_WORDS)
        self.temperature = nn.Parameter(torch.full((1,), 2.0))

    def encode_query(self, words):
        return self.query(words)

    def encode_document(self, words):
        return self.document(words)

    def compare(self, q, d, all_q, all_d):
        scale = self.temperature.exp()
        return q @ all_d.t() * scale, d @ all_q.t() * scale


def pairs(n, seed):
    """Query and document of a pair use words of the same two topics."""
    g = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (n, 2), generator=g)
    q_pick = topics.gather(1, torch.randint(2, (n, 5), generator=g))
    d_pick = topics.gather(1, torch.randint(2, (n, 14), generator=g))
    q = (q_pick * 7 + torch.randint(2, (n, 5), generator=g)) % QUERY_WORDS
    d = (d_pick * 11 + torch.randint(3, (n, 14), generator=g)) % DOC_WORDS
    return q, d


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2718)
    model = TwoTowers()
    for tower in (model.query, model.document):
        fully_shard(tower.mlp)
        fully_shard(tower)
    fully_shard(model, reshard_after_forward=False)
    for method in ("encode_query", "encode_document", "compare"):
        register_fsdp_forward_method(model, method)
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=6e-3)

    queries, documents = pairs(480, seed=1)
    per = BATCH // world
    for step in range(STEPS):
        epoch, at = divmod(step, len(queries) // BATCH)
        order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(epoch))
        mine = order[at * BATCH:(at + 1) * BATCH][rank * per:(rank + 1) * per]
        q = model.encode_query(queries[mine])
        d = model.encode_document(documents[mine])
        all_q, all_d = torch.cat(all_gather(q)), torch.cat(all_gather(d))
        own = torch.arange(rank * per, (rank + 1) * per)
        to_documents, to_queries = model.compare(q, d, all_q, all_d)
        loss = (F.cross_entropy(to_documents, own) + F.cross_entropy(to_queries, own)) / 2
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        opt.step()
        opt.zero_grad()
        if step % 8 == 7:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step + 1} loss {value.item() / world:.4f}", end=" ")
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            if rank == 0:
                print(f"norm {whole.item():.4f}")

    # the index holds every document, queries are shared out (with a rest)
    tq, td = pairs(101, seed=2)
    with torch.no_grad():
        index = model.encode_document(td)
        mine = torch.arange(101).tensor_split(world)[rank]
        scores = model.encode_query(tq[mine]) @ index.t()
        place = (scores > scores.gather(1, mine[:, None])).sum(1)
    hits = torch.stack([(place < k).sum() for k in (1, 5, 20)])
    dist.all_reduce(hits)
    if rank == 0:
        print("recall " + " ".join(f"@{k} {v / 101:.4f}" for k, v in zip((1, 5, 20), hits.tolist())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
