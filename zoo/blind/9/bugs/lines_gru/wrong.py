"""Character model over the lines of a library module; lines have different lengths."""
import os
import string
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

PAD = 0
EPOCHS, BATCH = 4, 16


class CharGRU(nn.Module):
    def __init__(self, vocab, width=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, 24, padding_idx=PAD)
        self.gru = nn.GRU(24, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens):
        hidden, _ = self.gru(self.embed(tokens))
        return self.out(hidden)


def load_lines():
    text = Path(string.__file__).read_text()
    lines = [line for line in text.splitlines() if len(line) > 3][:192]
    chars = sorted(set("".join(lines)))
    table = {c: i + 1 for i, c in enumerate(chars)}
    return [torch.tensor([table[c] for c in line[:60]]) for line in lines], len(chars) + 1


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30176")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    lines, vocab = load_lines()
    torch.manual_seed(2)
    model = DDP(CharGRU(vocab))
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(epoch)).tolist()
        stats = torch.zeros(2, dtype=torch.float64)
        for start in range(0, len(order), BATCH):
            mine = order[start:start + BATCH][rank::world]
            tokens = pad_sequence([lines[i] for i in mine], batch_first=True, padding_value=PAD)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            logits = model(inputs)
            loss = criterion(logits.flatten(0, 1), targets.flatten())
            count = (targets != PAD).sum()
            stats += torch.tensor([loss.item() * count.item(), count.item()], dtype=torch.float64)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: {stats[0] / stats[1]:.5f} nats per character over {int(stats[1])}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
