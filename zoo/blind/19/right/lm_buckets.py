"""Character-level GRU language model on sequences of very different length.

Batches are formed globally: shuffle, sort by length inside chunks, cut into batches of GLOBAL_BATCH
sequences, shuffle the batches; every rank then takes each W-th sequence of the batch.  The loss is the
mean over all target tokens of the global batch.  The maximal length grows whenever validation improves.
"""
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, PAD = 20, 0
GLOBAL_BATCH, CHUNK, ACCUM = 32, 128, 2
EPOCHS, CLIP, BASE_LR, WARMUP = 4, 1.0, 4e-3, 6


def make_corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    trans = torch.softmax(2.5 * torch.randn(VOCAB - 1, VOCAB - 1, generator=torch.Generator().manual_seed(5)), 1)
    corpus = []
    for _ in range(n):
        length = int(torch.randint(4, 25, (1,), generator=g))
        seq = [int(torch.randint(0, VOCAB - 1, (1,), generator=g))]
        while len(seq) < length:
            seq.append(int(torch.multinomial(trans[seq[-1]], 1, generator=g)))
        corpus.append(torch.tensor(seq) + 1)
    return corpus


class CharLM(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return self.out(self.norm(hidden))


def collate(seqs):
    width = max(len(s) for s in seqs)
    batch = torch.full((len(seqs), width), PAD)
    for row, s in enumerate(seqs):
        batch[row, :len(s)] = s
    return batch[:, :-1], batch[:, 1:]


def token_loss(model, seqs):
    inputs, targets = collate(seqs)
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")


def bucketed(corpus, max_len, epoch):
    g = torch.Generator().manual_seed(1000 + epoch)
    ids = [i for i in torch.randperm(len(corpus), generator=g).tolist() if len(corpus[i]) <= max_len]
    batches = []
    for start in range(0, len(ids), CHUNK):
        chunk = sorted(ids[start:start + CHUNK], key=lambda i: (len(corpus[i]), i))
        batches += [chunk[k:k + GLOBAL_BATCH] for k in range(0, len(chunk), GLOBAL_BATCH)]
    batches = [b for b in batches if len(b) == GLOBAL_BATCH]  # short remainders are left out
    return [batches[k] for k in torch.randperm(len(batches), generator=g).tolist()]


def total(value, distributed):
    value = torch.as_tensor(value, dtype=torch.float64)
    if distributed:
        dist.all_reduce(value)
    return value.item()


@torch.no_grad()
def validate(net, corpus, rank, world):
    mine = corpus[rank::world]
    loss = token_loss(net, mine)
    tokens = sum(len(s) - 1 for s in mine)
    return total(loss, world > 1) / total(tokens, world > 1)


def main():
    torch.set_default_dtype(torch.float64)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(11)
    net = CharLM()
    model = DDP(net) if world > 1 else net
    train, valid = make_corpus(400, 1), make_corpus(61, 2)
    optim = torch.optim.AdamW(model.parameters(), lr=BASE_LR, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda s: min(1.0, (s + 1) / WARMUP))
    max_len, best = 12, math.inf

    for epoch in range(EPOCHS):
        for batch in bucketed(train, max_len, epoch):
            mine = batch[rank::world]
            tokens = total(sum(len(train[i]) - 1 for i in mine), world > 1)
            micro = [mine[k::ACCUM] for k in range(ACCUM)]
            for k, ids in enumerate(micro):
                last = k == ACCUM - 1
                with model.no_sync() if world > 1 and not last else contextlib.nullcontext():
                    loss = token_loss(model, [train[i] for i in ids])
                    (loss * world / tokens).backward()  # DDP averages over ranks
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optim.step()
            sched.step()
            optim.zero_grad(set_to_none=True)
        score = validate(net, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch} max_len {max_len} valid loss {score:.10f} ppl {math.exp(score):.8f}")
        if score < best - 0.01:
            best, max_len = score, min(24, max_len + 6)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
