"""Speech recognition in small: a bidirectional GRU reads frames of spoken digit strings and is trained with CTC.

Utterances and transcripts have different lengths, so a batch is padded to its own longest utterance and packed.
Mixed-precision plumbing (GradScaler, unscale, clip) is kept from the GPU version of this script.

    python ctc_speech.py            |            torchrun --nproc-per-node 4 ctc_speech.py
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

BATCH, EPOCHS, BANDS, SYMBOLS = 32, 4, 12, 6


class Utterances(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        voices = np.random.default_rng(5).normal(size=(SYMBOLS, BANDS))
        self.items = []
        for _ in range(n):
            text = rng.integers(0, SYMBOLS, size=rng.integers(2, 6))
            frames = [np.repeat(voices[s][None], rng.integers(3, 7), 0) for s in text]
            frames = np.concatenate(frames)
            frames = frames + 0.4 * rng.normal(size=frames.shape)
            self.items.append((torch.tensor(frames, dtype=torch.float32), torch.tensor(text) + 1))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    frames, texts = zip(*items)
    return (pad_sequence(frames, batch_first=True), torch.tensor([len(f) for f in frames]),
            torch.cat(texts), torch.tensor([len(t) for t in texts]))


class Recogniser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.front = nn.Linear(BANDS, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, SYMBOLS + 1)

    def forward(self, x, lengths):
        x = pack_padded_sequence(torch.tanh(self.front(x)), lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.gru(x)[0], batch_first=True)
        return self.out(x).log_softmax(-1)


def edits(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@torch.no_grad()
def error_rate(net, loader):
    wrong = total = 0
    for x, lengths, texts, sizes in loader:
        best = net(x, lengths).argmax(-1)
        for line, n, text in zip(best, lengths, texts.split(sizes.tolist())):
            line = torch.unique_consecutive(line[:n])
            wrong += edits(line[line > 0].tolist(), text.tolist())
            total += len(text)
    counts = torch.tensor([wrong, total])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)

    train, test = Utterances(320, 1), Utterances(77, 2)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, BATCH // world, sampler=sampler, collate_fn=collate)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), 8, collate_fn=collate)

    net = DDP(Recogniser())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-2, total_steps=EPOCHS * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=9)
    criterion = nn.CTCLoss(zero_infinity=True)         # each utterance by its number of symbols, then the mean
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, lengths, texts, sizes in loader:
            loss = criterion(net(x, lengths).transpose(0, 1), texts, lengths, sizes)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            total += loss.detach()
        dist.all_reduce(total)
        rate = error_rate(net.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / world:.4f} errors {rate:.4f} scale {scaler.get_scale():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
