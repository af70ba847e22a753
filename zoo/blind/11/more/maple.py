# CTC recogniser for synthetic "utterances"; batches are made by a frame budget, so their size changes all the time
import os
import random
import time
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

VOCAB = 9          # 0 is the blank
MAX_FRAMES = 500   # budget of a batch over all processes, padding included
EPOCHS = 5


def make_corpus(n=360, seed=0):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(VOCAB, 12, generator=g)
    items = []
    for _ in range(n):
        L = int(torch.randint(2, 8, (1,), generator=g))
        y = torch.randint(1, VOCAB, (L,), generator=g)
        dur = torch.randint(2, 5, (L,), generator=g)
        x = proto[torch.repeat_interleave(y, dur)]
        items.append((x + 0.4 * torch.randn(x.shape, generator=g), y))
    return items


class BucketBatchSampler:
    """Sorts by length (with noise), packs up to MAX_FRAMES, shuffles the batches and gives each process every
    world-th utterance of each batch. A short batch may leave a process with nothing."""

    def __init__(self, lengths, rank, world):
        self.lengths, self.rank, self.world, self.epoch = lengths, rank, world, 0

    def __iter__(self):
        rnd = random.Random(self.epoch)
        ids = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + rnd.random() * 2)
        batches, cur, longest = [], [], 0
        for i in ids:
            longest_new = max(longest, self.lengths[i])
            if cur and longest_new * (len(cur) + 1) > MAX_FRAMES:
                batches.append(cur)
                cur, longest_new = [], self.lengths[i]
            cur.append(i)
            longest = longest_new
        batches.append(cur)
        rnd.shuffle(batches)
        for b in batches:
            yield b[self.rank::self.world], len(b)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(12, 48, 3, padding=1)
        self.rnn = nn.GRU(48, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, VOCAB)

    def forward(self, x, lens):
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h = nn.utils.rnn.pack_padded_sequence(h, lens, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(h)[0], batch_first=True)
        return self.out(h).log_softmax(-1)


def collate(items):
    xs, ys = zip(*items)
    return (pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.cat(ys), torch.tensor([len(y) for y in ys]))


def greedy(logp, lens):
    out = []
    for row, n in zip(logp.argmax(-1), lens):
        row = torch.unique_consecutive(row[:n])
        out.append(row[row > 0].tolist())
    return out


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30113")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    corpus = make_corpus()
    train, dev = corpus[:320], corpus[320:]
    model = Recogniser()
    params = list(model.parameters())
    opt = torch.optim.Adam(params, lr=4e-3)
    ctc = nn.CTCLoss(blank=0, reduction="none", zero_infinity=True)
    sampler = BucketBatchSampler([len(x) for x, _ in train], rank, world)
    for epoch in range(EPOCHS):
        sampler.epoch = epoch
        total = 0.0
        for ids, batch_size in sampler:
            opt.zero_grad(set_to_none=False)
            if ids:
                x, lens, y, ylens = collate([train[i] for i in ids])
                nll = ctc(model(x, lens).transpose(0, 1), y, lens, ylens)
                loss = (nll / ylens).sum() / batch_size
                loss.backward()
                total += loss.item()
            for p in params:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
            nn.utils.clip_grad_norm_(params, 5.0)
            opt.step()
        t = torch.tensor(total)
        dist.all_reduce(t)
        model.eval()
        with torch.no_grad():
            x, lens, y, ylens = collate(dev)
            hyp = greedy(model(x, lens), lens)
        model.train()
        exact = sum(h == r.tolist() for h, r in zip(hyp, y.split(ylens.tolist())))
        if rank == 0:
            print(f"epoch {epoch}: summed loss {t:.4f}, exact {exact}/{len(dev)}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
