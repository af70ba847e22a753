"""A policy that writes four digits with a wanted sum, trained by group relative policy optimisation."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
PROMPTS, GROUP, DIGITS, WIDTH = 6, 8, 4, 32


def init():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.wanted = nn.Linear(1, WIDTH)
        self.digit = nn.Embedding(10, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, wanted, digits):
        """Log probabilities of the written digits."""
        state = torch.tanh(self.wanted(wanted[:, None] / 36))
        out = []
        for t in range(digits.size(1)):
            out.append(self.head(state).log_softmax(-1).gather(1, digits[:, t:t + 1]))
            state = self.cell(self.digit(digits[:, t]), state)
        return torch.cat(out, 1)

    @torch.no_grad()
    def write(self, wanted, uniform):
        state = torch.tanh(self.wanted(wanted[:, None] / 36))
        digits = []
        for t in range(DIGITS):
            ladder = self.head(state).softmax(-1).cumsum(-1)
            choice = (uniform[:, t:t + 1] > ladder).sum(1).clamp(max=9)
            digits.append(choice)
            state = self.cell(self.digit(choice), state)
        return torch.stack(digits, 1)


def gather_groups(x, world):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def main():
    rank, world = init()
    torch.manual_seed(2)
    policy = DDP(Policy())
    frozen = copy.deepcopy(policy.module).requires_grad_(False)
    opt = torch.optim.Adam(policy.parameters(), lr=4e-3)
    share = GROUP // world
    mine = slice(rank * share, (rank + 1) * share)
    for step in range(40):
        g = torch.Generator().manual_seed(1000 + step)
        sums = torch.randint(6, 31, (PROMPTS,), generator=g).double()
        uniform = torch.rand(PROMPTS, GROUP, DIGITS, generator=g)[:, mine].reshape(-1, DIGITS)
        wanted = sums[:, None].expand(PROMPTS, share).reshape(-1)
        digits = policy.module.write(wanted, uniform)
        rewards = -(digits.sum(1) - wanted).abs().view(PROMPTS, share) / 10
        everyone = gather_groups(rewards, world)
        mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
        advantage = ((rewards - mean) / (std + 1e-4)).reshape(-1, 1)
        with torch.no_grad():
            old = policy.module(wanted, digits)
            base = frozen(wanted, digits)
        for _ in range(2):
            new = policy(wanted, digits)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = (base - new).exp() - (base - new) - 1
            loss = (0.02 * kl - gain).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} mean reward {everyone.mean():.6f}")
    if rank == 0:
        wanted = torch.arange(6, 31).double().repeat(20)
        uniform = torch.rand(len(wanted), DIGITS, generator=torch.Generator().manual_seed(7))
        digits = policy.module.write(wanted, uniform)
        size = sum(p.square().sum() for p in policy.parameters()).sqrt()
        print(f"final distance {(digits.sum(1) - wanted).abs().mean():.6f} weights {size:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
