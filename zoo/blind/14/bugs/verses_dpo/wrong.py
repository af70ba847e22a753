"""Direct preference optimisation of a small recurrent writer on pairs of short verses.

A pair is a prompt of four tokens with an answer that was preferred and one that was not; answers differ in length.
The reference is the writer as it was before the tuning. Start it with `python` or with `torchrun`.
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, PROMPT, LONGEST = 24, 4, 14


class Preferences(Dataset):
    """Preferred answers climb in small steps from the last token of the prompt, the others wander."""

    def __init__(self, pairs, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = [self.make(g) for _ in range(pairs)]

    @staticmethod
    def make(g):
        prompt = torch.randint(VOCAB, (PROMPT,), generator=g)
        tokens = torch.zeros(2, LONGEST, dtype=torch.long)
        mask = torch.zeros(2, LONGEST)
        for side, spread in enumerate((3, VOCAB)):
            length = int(torch.randint(4, LONGEST - PROMPT + 1, (1,), generator=g))
            steps = torch.randint(spread, (length,), generator=g)
            answer = (prompt[-1] + steps.cumsum(0)) % VOCAB
            tokens[side, :PROMPT + length] = torch.cat([prompt, answer])
            mask[side, PROMPT:PROMPT + length] = 1
        return tokens, mask

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Writer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return self.head(hidden)


def answer_log_prob(model, tokens, mask):
    """Log-probability of the answer tokens, summed over each sequence."""
    logp = model(tokens[:, :-1]).log_softmax(-1)
    logp = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (logp * mask[:, 1:]).sum(-1)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=32, help="pairs in a step, over all processes")
    p.add_argument("--beta", type=float, default=0.2)
    p.add_argument("--lr", type=float, default=3e-3)
    return p.parse_args()


def main():
    args = parse()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    torch.manual_seed(1)
    policy = DDP(Writer())
    reference = copy.deepcopy(policy.module).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)

    data = Preferences(320, seed=5)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        report = torch.zeros(3)
        for tokens, mask in loader:
            tokens, mask = tokens.flatten(0, 1), mask.flatten(0, 1)
            with torch.no_grad():
                base = answer_log_prob(reference, tokens, mask).view(-1, 2)
            now = answer_log_prob(policy.module, tokens, mask).view(-1, 2)
            reward = args.beta * (now - base)
            margin = reward[:, 0] - reward[:, 1]
            loss = -F.logsigmoid(margin).mean()

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report += torch.stack([loss.detach(), margin.detach().mean(), (margin > 0).float().mean()])

        dist.all_reduce(report)
        report /= world * len(loader)
        if rank == 0:
            print(f"epoch {epoch} loss {report[0]:.4f} margin {report[1]:.4f} preferred {report[2]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
