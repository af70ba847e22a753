"""Word vectors by skip-gram with negative sampling: sparse gradients, DDP and SparseAdam."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, TOPICS, DIM = 150, 5, 16
BATCH, NEGATIVES, EPOCHS, SPAN = 128, 5, 3, 2


def corpus(sentences=260, length=12):
    """Sentences about one topic each, with common words mixed in; word w belongs to topic w % TOPICS."""
    g = torch.Generator().manual_seed(13)
    popularity = 1.0 / (1 + torch.arange(VOCAB // TOPICS))
    out = []
    for _ in range(sentences):
        topic = int(torch.randint(TOPICS, (1,), generator=g))
        words = torch.multinomial(popularity, length, replacement=True, generator=g) * TOPICS + topic
        common = torch.rand(length, generator=g) < 0.15
        out.append(torch.where(common, torch.randint(VOCAB, (length,), generator=g), words))
    return torch.stack(out)


def skip_pairs(text):
    pairs = []
    for gap in range(1, SPAN + 1):
        a, b = text[:, :-gap].flatten(), text[:, gap:].flatten()
        pairs += [torch.stack([a, b], 1), torch.stack([b, a], 1)]
    return torch.cat(pairs)


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(VOCAB, DIM, sparse=True)
        self.context = nn.Embedding(VOCAB, DIM, sparse=True)
        nn.init.uniform_(self.word.weight, -0.5 / DIM, 0.5 / DIM)
        nn.init.zeros_(self.context.weight)

    def forward(self, centre, around, negative):
        w = self.word(centre)
        good = (w * self.context(around)).sum(1)
        bad = torch.einsum("bd,bkd->bk", w, self.context(negative))
        return -(F.logsigmoid(good) + F.logsigmoid(-bad).sum(1)).mean()


def topic_purity(vectors):
    """Share of the nearest neighbours of the frequent words that have their topic."""
    unit = F.normalize(vectors[:60], dim=1)
    near = (unit @ unit.T).fill_diagonal_(-2).topk(5).indices
    return (near % TOPICS == torch.arange(60)[:, None] % TOPICS).double().mean().item()


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    text = corpus()
    pairs = skip_pairs(text)
    pairs = pairs[: len(pairs) // BATCH * BATCH]
    noise = torch.bincount(text.flatten(), minlength=VOCAB).double().clamp(min=1).pow(0.75)

    torch.manual_seed(66)
    net = SkipGram()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SparseAdam(list(model.parameters()), lr=2e-2)
    order = torch.Generator().manual_seed(67)
    draws = torch.Generator().manual_seed(68)

    for epoch in range(EPOCHS):
        total = torch.zeros(1)
        shuffled = pairs[torch.randperm(len(pairs), generator=order)]
        for batch in shuffled.split(BATCH):
            negative = torch.multinomial(noise, BATCH * NEGATIVES, replacement=True, generator=draws)
            negative = negative.view(BATCH, NEGATIVES).chunk(world)[rank]
            mine = batch.chunk(world)[rank]
            loss = model(mine[:, 0], mine[:, 1], negative)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            mean = total.item() / world / (len(pairs) // BATCH)
            print(f"epoch {epoch}: loss {mean:.6f}  purity {topic_purity(net.word.weight.detach()):.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
