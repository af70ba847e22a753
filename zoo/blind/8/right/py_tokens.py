"""Language model over the tokens of a Python source file, with gradient accumulation."""
import contextlib
import io
import os
import statistics
import time
import tokenize

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WINDOW, MICRO, EPOCHS, PAD = 32, 4, 3, 0


def load_lines():
    with open(statistics.__file__) as f:
        source = f.read()
    lines, line = [], []
    for tok in tokenize.generate_tokens(io.StringIO(source).readline):
        if tok.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            line.append(tok.string)
        elif tok.type == tokenize.NEWLINE:
            lines.append(line[:16])
            line = []
    lines = [ln for ln in lines if len(ln) > 2]
    vocab = {w: i + 2 for i, w in enumerate(sorted({w for ln in lines for w in ln}))}
    return [torch.tensor([1] + [vocab[w] for w in ln]) for ln in lines], len(vocab) + 2


class LM(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29845")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    lines, vocab = load_lines()
    lines = lines[:494]
    torch.manual_seed(23)
    model = DDP(LM(vocab))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(0, len(order), WINDOW):
            window = [lines[i] for i in order[start:start + WINDOW]]
            tokens = sum(len(ln) - 1 for ln in window)
            mine = window[rank::world]
            micros = [mine[i:i + MICRO] for i in range(0, len(mine), MICRO)]
            opt.zero_grad()
            nll = torch.zeros(())
            for i, micro in enumerate(micros):
                last = i == len(micros) - 1
                ids = nn.utils.rnn.pad_sequence(micro, batch_first=True, padding_value=PAD)
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(ids[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
                    (loss * world / tokens).backward()
                nll += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            dist.all_reduce(nll)
            if rank == 0 and step % 8 == 0:
                print(f"step {step} nll/token {nll.item() / tokens:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
