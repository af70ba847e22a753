"""Ring attention: associative recall over a long sequence that is cut over the processes.

Keys and values travel round the ring while queries stay; partial results are merged with running log-sums.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

KEYS, VALUES, LENGTH, WIDTH, HEADS = 12, 8, 32, 32, 4
VOCAB = KEYS + VALUES
BATCH, STEPS = 24, 48


def pass_on(x, step):
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return x.clone()
    out = torch.empty_like(x)
    work = dist.isend(x.contiguous(), (rank + step) % world)
    dist.recv(out, (rank - step) % world)
    work.wait()
    return out


class Shift(torch.autograd.Function):
    """Hand a block on to the right; its gradient comes back from there."""

    @staticmethod
    def forward(ctx, x):
        return pass_on(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return pass_on(grad, -1)


def ring_attention(q, k, v):
    """q, k, v: (batch, heads, own positions, size), causal over the whole sequence."""
    world, rank = dist.get_world_size(), dist.get_rank()
    t = q.shape[2]
    here = torch.arange(t)
    out, logsum = torch.zeros_like(q), torch.full(q.shape[:3], -1e9, dtype=q.dtype)
    both = torch.stack([k, v])
    for hop in range(world):
        source = (rank - hop) % world
        scores = q @ both[0].transpose(2, 3) / q.shape[3] ** 0.5
        later = (source * t + here)[None, :] > (rank * t + here)[:, None]
        scores = scores.masked_fill(later, -1e9)
        part_sum = scores.logsumexp(3)
        part = scores.softmax(3) @ both[1]
        total = torch.logaddexp(logsum, part_sum)
        out = out * (logsum - total).exp()[..., None] + part * (part_sum - total).exp()[..., None]
        logsum = total
        if hop < world - 1:
            both = Shift.apply(both)
    return out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(ring_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Recall(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.before = nn.Embedding(VOCAB + 1, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.out = nn.Linear(WIDTH, VALUES)

    def forward(self, x, before, first):
        h = self.tokens(x) + self.before(before) + self.places(torch.arange(first, first + x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


def episodes(n, g):
    """key value key value ...; a key that was seen before must be followed by its value."""
    book = torch.randint(VALUES, (n, KEYS), generator=g)
    keys = torch.randint(KEYS, (n, LENGTH // 2), generator=g)
    values = book.gather(1, keys)
    x = torch.stack([keys, KEYS + values], 2).flatten(1)
    again = ((keys[:, :, None] == keys[:, None, :]) & torch.ones(LENGTH // 2, LENGTH // 2).tril(-1).bool()).any(2)
    y = torch.full((n, LENGTH), -100)
    y[:, ::2] = torch.where(again, values, torch.tensor(-100))
    before = F.pad(x[:, :-1], (1, 0), value=VOCAB)
    return x, before, y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    net = Recall().double()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
    g = torch.Generator().manual_seed(15)
    t = LENGTH // world
    own = slice(rank * t, (rank + 1) * t)

    for step in range(STEPS):
        x, before, y = episodes(BATCH, g)
        asked = (y != -100).sum()
        logits = net(x[:, own], before[:, own], rank * t)
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, own].flatten(), ignore_index=-100, reduction="sum") / asked
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()])
        dist.all_reduce(flat)
        for p, part in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()])):
            p.grad.copy_(part.view_as(p))
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if step % 8 == 7:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step + 1} loss {value.item():.4f} asked {asked.item()}")

    x, before, y = episodes(50, torch.Generator().manual_seed(16))
    with torch.no_grad():
        guess = net(x[:, own], before[:, own], rank * t).argmax(2)
    result = torch.stack([(guess == y[:, own]).sum(), (y[:, own] != -100).sum()])
    dist.all_reduce(result)
    if rank == 0:
        print(f"recalled {result[0].item()} of {result[1].item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
