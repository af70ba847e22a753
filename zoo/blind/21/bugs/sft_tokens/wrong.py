"""Supervised fine-tuning on prompt/response pairs of unequal length: the loss is the
mean over all response tokens of an optimizer step (several micro-batches per process)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from contextlib import nullcontext

torch.set_default_dtype(torch.float64)
IGNORE = -100


class Tagger(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def build_examples(count, vocab, seed):
    gen = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(count):
        prompt = torch.randint(2, vocab, (int(torch.randint(2, 6, (), generator=gen)),), generator=gen)
        repeats = int(torch.randint(1, 4, (), generator=gen))
        response = prompt.flip(0).repeat(repeats)
        ids = torch.cat([prompt, torch.tensor([1]), response])
        labels = ids.clone()
        labels[: len(prompt) + 1] = IGNORE
        examples.append((ids, labels))
    return examples


def collate(items):
    ids = nn.utils.rnn.pad_sequence([i for i, _ in items], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([l for _, l in items], batch_first=True, padding_value=IGNORE)
    return ids[:, :-1], labels[:, 1:]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group("gloo")
        torch.manual_seed(args.seed)
        self.model = Tagger(args.vocab, args.width)
        self.net = DistributedDataParallel(self.model) if self.world > 1 else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

    def sum_over_ranks(self, value):
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def step(self, micro_batches):
        tokens = sum((labels != IGNORE).sum() for _, labels in micro_batches)
        tokens = self.sum_over_ranks(tokens).item()
        reported = torch.zeros(())
        for i, (ids, labels) in enumerate(micro_batches):
            final = i + 1 == len(micro_batches)
            quiet = self.net.no_sync() if self.world > 1 and not final else nullcontext()
            with quiet:
                logits = self.net(ids)
                loss = self.criterion(logits.flatten(0, 1), labels.flatten()) / tokens
                reported += loss.detach()
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.sum_over_ranks(reported).item()

    def fit(self, examples):
        a = self.args
        for epoch in range(a.epochs):
            order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(epoch))
            for s, chunk in enumerate(order.split(a.global_batch)):
                mine = chunk[self.rank::self.world]
                micro = [collate([examples[i] for i in part.tolist()])
                         for part in mine.split(a.micro_batch)]
                loss = self.step(micro)
                if self.rank == 0 and s % 4 == 3:
                    print(f"epoch {epoch} step {s + 1} loss {loss:.10f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=14)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    trainer = Trainer(args)
    trainer.fit(build_examples(256, args.vocab, seed=8))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
