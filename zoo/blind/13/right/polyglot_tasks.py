"""One trunk, four languages: every language has its own reader and its own head.

A process takes whole languages (its readers and heads are the only ones in its graph), so no process pads
one language's words to another's length.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LANGUAGES = {"ada": (20, 9, 3), "bel": (30, 6, 4), "cor": (26, 12, 5), "dun": (41, 7, 3)}   # letters, length, classes
SHARE = {"ada": 12, "bel": 20, "cor": 8, "dun": 24}                                          # words in a step
STEPS = 36


class Polyglot(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.readers = nn.ModuleDict({k: nn.Embedding(v[0], width) for k, v in LANGUAGES.items()})
        self.trunk = nn.Sequential(nn.Linear(2 * width, 48), nn.SiLU(), nn.Linear(48, width), nn.SiLU())
        self.heads = nn.ModuleDict({k: nn.Linear(width, v[2]) for k, v in LANGUAGES.items()})

    def forward(self, batch):
        # a lesson without words is a lesson of no rows
        out = {"none": self.trunk(torch.zeros(0, self.trunk[0].in_features)).sum()}
        for name, letters in batch.items():
            e = self.readers[name](letters)
            out[name] = self.heads[name](self.trunk(torch.cat([e.mean(1), e[:, -1]], 1)))
        return out


def corpus(name, n, seed):
    letters, length, classes = LANGUAGES[name]
    g = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    words = torch.randint(letters, (n, length), generator=g)
    values = torch.Generator().manual_seed(sum(map(ord, name)))
    weight = torch.randn(letters, classes, generator=values)
    return words, (weight[words].mean(1) + weight[words[:, -1]]).argmax(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31 * (rank + 1))
    model = DDP(Polyglot(), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    mine = list(LANGUAGES)[rank::world]
    data = {name: corpus(name, 600, seed=0) for name in mine}
    held = {name: corpus(name, 150, seed=1) for name in mine}
    draw = {name: torch.Generator().manual_seed(sum(map(ord, name)) * 3) for name in mine}

    for step in range(STEPS):
        # words of the rare language come into the lessons late
        lessons = [n for n in LANGUAGES if n != "cor" or step >= 10]
        total = sum(SHARE[n] for n in lessons)
        batch, labels = {}, {}
        for name in mine:
            rows = torch.randint(600, (SHARE[name],), generator=draw[name])
            if name in lessons:
                batch[name], labels[name] = data[name][0][rows], data[name][1][rows]
        logits = model(batch)
        loss = logits["none"]
        for name in batch:
            loss = loss + F.cross_entropy(logits[name], labels[name], reduction="sum")
        opt.zero_grad()
        (loss * world / total).backward()
        opt.step()
        if step % 9 == 8:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step + 1} loss {value.item() / total:.4f}")

    model.eval()
    with torch.no_grad():
        results = {n: (model.module({n: w})[n].argmax(1) == y).float().mean().item() for n, (w, y) in held.items()}
    gathered = [None] * world
    dist.all_gather_object(gathered, results)
    if rank == 0:
        everyone = {k: v for part in gathered for k, v in part.items()}
        for name in LANGUAGES:
            print(f"{name} accuracy {everyone[name]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
