"""Tags every character of a source line with the kind of Python token it belongs to."""
import argparse
import difflib
import inspect
import io
import time
import tokenize

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

KINDS = {tokenize.NAME: 1, tokenize.OP: 2, tokenize.STRING: 3, tokenize.NUMBER: 4, tokenize.COMMENT: 5}
IGNORE = -100


def tagged_lines(module, limit=80):
    source = inspect.getsource(module)
    lines = source.splitlines()
    tags = [[0] * len(line) for line in lines]
    for tok in tokenize.generate_tokens(io.StringIO(source).readline):
        (r0, c0), (r1, c1) = tok.start, tok.end
        if tok.type in KINDS:
            for row in range(r0, r1 + 1):
                first, last = (c0 if row == r0 else 0), (c1 if row == r1 else len(lines[row - 1]))
                tags[row - 1][first:last] = [KINDS[tok.type]] * (last - first)
    return [(torch.tensor([min(ord(c), 127) for c in line[:limit]]), torch.tensor(tag[:limit]))
            for line, tag in zip(lines, tags) if line.strip()]


class Tagger(nn.Module):
    def __init__(self, dim=24, width=48, kinds=6):
        super().__init__()
        self.embed = nn.Embedding(128, dim, padding_idx=0)
        self.near = nn.Conv1d(dim, width, 7, padding=3)
        self.mix = nn.Linear(width, width)
        self.tag = nn.Linear(width, kinds)

    def forward(self, codes):
        x = torch.relu(self.near(self.embed(codes).transpose(1, 2))).transpose(1, 2)
        return self.tag(torch.relu(self.mix(x)))


def rate_at(tokens, peak, warmup, budget):
    """Linear warm-up and linear decay, both counted in tokens rather than in steps."""
    if tokens < warmup:
        return peak * (0.1 + 0.9 * tokens / warmup)
    return peak * max(0.05, (budget - tokens) / (budget - warmup))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lines", type=int, default=32, help="lines in a step, over all processes")
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--peak", type=float, default=0.2)
    ap.add_argument("--warmup-tokens", type=int, default=8000)
    ap.add_argument("--token-budget", type=int, default=50000)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = DDP(Tagger())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD,
                                        lr=args.peak, momentum=0.8)
    data = tagged_lines(difflib)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(17))

    seen = 0
    for step in range(args.steps):
        picked = order[torch.arange(step * args.lines, (step + 1) * args.lines) % len(order)]
        mine = [data[i] for i in picked[rank::world]]
        codes = pad_sequence([c for c, _ in mine], batch_first=True)
        tags = pad_sequence([t for _, t in mine], batch_first=True, padding_value=IGNORE)

        here = (tags != IGNORE).sum()
        everywhere = here.clone()
        dist.all_reduce(everywhere)
        rate = rate_at(seen, args.peak, args.warmup_tokens, args.token_budget)
        for group in optimizer.param_groups:
            group["lr"] = rate

        logits = model(codes)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE,
                                           reduction="sum") * world / everywhere
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += here.item()

        if step % 9 == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} tokens {everywhere.item()} loss {shown.item():.4f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
