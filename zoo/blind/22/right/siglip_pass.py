"""Two-tower matching of spectra and descriptions with the pairwise sigmoid loss (SigLIP).

A process never holds all the embeddings: the blocks of the second tower travel around the ring of
processes, and their gradients travel back the same way.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

BATCH, STEPS, DIM = 64, 50, 16
rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))


def swap(tensor, to, source):
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    jobs = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor, to),
        dist.P2POp(dist.irecv, received, source),
    ])
    for job in jobs:
        job.wait()
    return received


class Pass(torch.autograd.Function):
    """Hand the block to the next process and take the one of the previous process."""

    @staticmethod
    def forward(ctx, block):
        return swap(block, (rank + 1) % world, (rank - 1) % world)

    @staticmethod
    def backward(ctx, grad):
        return swap(grad, (rank - 1) % world, (rank + 1) % world)


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, DIM))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=-1)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum, self.words = Tower(30), Tower(20)
        self.log_t = nn.Parameter(torch.tensor(2.3))
        self.bias = nn.Parameter(torch.tensor(-5.0))

    def block_loss(self, a, b, same):
        logits = a @ b.T * self.log_t.exp() + self.bias
        sign = 2 * torch.eye(len(a)) - 1 if same else -torch.ones(len(a), len(b))
        return -F.logsigmoid(sign * logits).sum()

    def forward(self, spectra, words):
        a, b = self.spectrum(spectra), self.words(words)
        loss = self.block_loss(a, b, same=True)
        for _ in range(world - 1):
            b = Pass.apply(b)
            loss = loss + self.block_loss(a, b, same=False)
        return loss / BATCH


def pairs(n, seed):
    mix = torch.Generator().manual_seed(123)
    w1, w2 = torch.randn(8, 30, generator=mix), torch.randn(8, 20, generator=mix)
    g = torch.Generator().manual_seed(seed)
    cause = torch.randn(n, 8, generator=g)
    return (torch.tanh(cause @ w1) + 0.2 * torch.randn(n, 30, generator=g),
            torch.tanh(cause @ w2) + 0.2 * torch.randn(n, 20, generator=g))


@torch.no_grad()
def recall(model, spectra, words):
    """Recall@1 of the text for a spectrum; queries are divided, candidates are not."""
    queries = torch.arange(rank, len(spectra), world)
    scores = model.spectrum(spectra[queries]) @ model.words(words).T
    hits = (scores.argmax(1) == queries).sum()
    if world > 1:
        dist.all_reduce(hits)
    return hits.item() / len(spectra)


def main():
    torch.set_default_dtype(torch.float64)
    if world > 1:
        dist.init_process_group("gloo")
    train, test = pairs(800, 1), pairs(160, 2)
    torch.manual_seed(41)
    model = Matcher()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)

    order = torch.Generator().manual_seed(43)
    for step in range(STEPS):
        rows = torch.randperm(len(train[0]), generator=order)[:BATCH].view(world, -1)[rank]
        loss = model(train[0][rows], train[1][rows])
        opt.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            jobs = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            jobs.append(dist.all_reduce(loss, async_op=True))
            for job in jobs:
                job.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        sched.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.6f} temperature {model.log_t.exp().item():.4f}")
    r = recall(model, *test)
    if rank == 0:
        print(f"recall@1 {r:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
