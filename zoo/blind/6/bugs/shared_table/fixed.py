"""Word-level n-gram model whose output layer shares its matrix with the input table. Gradients are summed
over the ranks, every rank divides by the number of words of the whole step."""
import ast
import inspect
import re
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 45
CONTEXT, DIM, BATCH = 4, 40, 96


class WordModel(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, DIM)
        nn.init.normal_(self.table.weight, std=0.1)
        self.mix = nn.Linear(CONTEXT * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, vocab)
        self.output.weight = self.table.weight

    def forward(self, words):
        h = torch.relu(self.mix(self.table(words).flatten(1)))
        return self.output(self.norm(h))


def words_of(module, size=400):
    found = re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", inspect.getsource(module))
    count = {}
    for w in found:
        count[w] = count.get(w, 0) + 1
    top = sorted(count, key=lambda w: (-count[w], w))[:size - 1]
    number = {w: i + 1 for i, w in enumerate(top)}
    return torch.tensor([number.get(w, 0) for w in found]), size


def sum_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def train():
    rank, world = dist.get_rank(), dist.get_world_size()
    stream, vocab = words_of(ast)
    torch.manual_seed(77)
    model = WordModel(vocab)
    opt = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.8)
    picks = torch.Generator().manual_seed(5)
    losses = []
    for step in range(STEPS):
        at = torch.randint(CONTEXT, len(stream), (BATCH,), generator=picks)
        at = at[rank * BATCH // world:(rank + 1) * BATCH // world]
        x = torch.stack([stream[i - CONTEXT:i] for i in at])
        loss = nn.functional.cross_entropy(model(x), stream[at], reduction="sum") / BATCH
        opt.zero_grad()
        loss.backward()
        sum_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 8.0)
        opt.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, losses = train()
    if dist.get_rank() == 0:
        for i in range(8, STEPS, 9):
            print(f"{i + 1:3d} {losses[i]:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()
