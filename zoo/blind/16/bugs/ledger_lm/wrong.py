"""A small language model of account books: lines of amounts, tied input and output embeddings."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
VOCAB, PAD, WIDTH, LENGTH = 24, 0, 32, 20


def setup():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
        return dist.get_rank(), world
    return 0, 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gates = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        decay, value = self.gates(self.norm(x)).chunk(2, -1)
        decay = torch.sigmoid(decay)
        state, states = torch.zeros_like(value[:, 0]), []
        for t in range(x.size(1)):
            state = decay[:, t] * state + (1 - decay[:, t]) * value[:, t]
            states.append(state)
        return x + self.out(torch.tanh(torch.stack(states, 1)))


class LedgerLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ledger(lines, seed):
    g = torch.Generator().manual_seed(seed)
    book = torch.full((lines, LENGTH + 1), PAD)
    for line in range(lines):
        n = int(torch.randint(8, LENGTH + 2, (1,), generator=g))
        start, step = torch.randint(1, VOCAB - 1, (2,), generator=g).tolist()
        entry = (start + step * torch.arange(n)) % (VOCAB - 1) + 1
        noisy = torch.rand(n, generator=g) < 0.05
        entry[noisy] = torch.randint(1, VOCAB, (int(noisy.sum()),), generator=g)
        book[line, :n] = entry
    return book


def buckets(model):
    """One message per layer."""
    for module in model.modules():
        params = list(module.parameters(recurse=False))
        if params:
            yield params


def sum_gradients(model):
    for params in buckets(model):
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat)
        for p, piece in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(piece.view_as(p))


def main():
    rank, world = setup()
    torch.manual_seed(3)
    model = LedgerLM()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    book = ledger(512, 7)
    g = torch.Generator().manual_seed(1)
    for epoch in range(4):
        seen = torch.zeros(2)
        for batch in torch.randperm(len(book), generator=g).split(32):
            lines = book[batch[rank::world]]
            inputs, targets = lines[:, :-1], lines[:, 1:]
            count = (targets != PAD).sum()
            if world > 1:
                dist.all_reduce(count)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
            opt.zero_grad()
            (loss / count).backward()
            if world > 1:
                sum_gradients(model)
            opt.step()
            seen += torch.stack([loss.detach(), count / world])
        if world > 1:
            dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} nats per token {seen[0] / seen[1]:.8f}")
    if rank == 0:
        with torch.no_grad():
            fresh = ledger(128, 8)
            logits = model(fresh[:, :-1]).flatten(0, 1)
            print(f"new lines {F.cross_entropy(logits, fresh[:, 1:].flatten(), ignore_index=PAD):.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
