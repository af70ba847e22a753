"""Long sequences cut over workers; every worker takes one early and one late piece of each sequence."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LENGTH, VOCAB, WIDTH, HEADS = 32, 20, 24, 3


class Context:
    """Which positions of the sequence live here, and where the others are."""

    def __init__(self):
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1:
            dist.init_process_group("gloo")
        pieces = torch.arange(LENGTH).chunk(2 * self.size)
        owned = [torch.cat([pieces[r], pieces[-1 - r]]) for r in range(self.size)]
        self.here = owned[self.rank]
        self.everywhere = torch.cat(owned)
        self.visible = self.here[:, None] >= self.everywhere[None, :]

    def reduce(self, x):
        if self.size > 1:
            dist.all_reduce(x)
        return x


class CollectSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context):
        ctx.context = context
        if context.size == 1:
            return x.clone()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(context.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        full = ctx.context.reduce(grad.clone(memory_format=torch.contiguous_format))
        return full.chunk(ctx.context.size, dim=2)[ctx.context.rank], None


class Layer(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context = context
        self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        y = self.n1(x)
        k, v = (CollectSequence.apply(self.heads(m), self.context) for m in self.kv(y).chunk(2, -1))
        q = self.heads(self.q(y))
        att = (q @ k.transpose(-1, -2)) / q.size(-1) ** 0.5
        att = att.masked_fill(~self.context.visible, float("-inf")).softmax(-1)
        x = x + self.o((att @ v).transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x))


class LanguageModel(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context = context
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(context) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(self.context.here)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def copies(n, seed):
    """A prompt and then its repetition; only the repetition is scored."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.zeros(n, LENGTH + 1, dtype=torch.long)
    scored = torch.zeros(n, LENGTH + 1, dtype=torch.bool)
    for row, mask in zip(ids, scored):
        size = int(torch.randint(5, 13, (1,), generator=gen))
        prompt = torch.randint(1, VOCAB, (size,), generator=gen)
        row[:] = prompt.repeat(LENGTH // size + 2)[: LENGTH + 1]
        mask[size:] = True
    return ids, scored


def score(model, context, ids, scored):
    target, mask = ids[:, 1:], scored[:, 1:]
    logits = model(ids[:, :-1][:, context.here])
    losses = F.cross_entropy(logits.transpose(1, 2), target[:, context.here], reduction="none")
    return (losses * mask[:, context.here]).sum() / mask.sum()


def main():
    context = Context()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(33)
    model = LanguageModel(context)
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
    ids, scored = copies(128, seed=1)
    order = torch.Generator().manual_seed(3)
    for step in range(24):
        rows = torch.randperm(len(ids), generator=order)[:8]
        loss = score(model, context, ids[rows], scored[rows])
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            context.reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with torch.no_grad():
        test = context.reduce(score(model, context, *copies(32, seed=2)))
    if context.rank == 0:
        print(f"copying loss {test.item():.10f}")
        print(f"place norm {model.places.weight.norm().item():.10f}")
    if context.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
