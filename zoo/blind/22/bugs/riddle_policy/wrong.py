"""Group-relative policy optimisation of a small answer policy on arithmetic riddles."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

DIGITS, LENGTH = 10, 3
RIDDLES, ROLLOUTS = 8, 8
STEPS = 24
KL_WEIGHT = 0.02


class AnswerPolicy(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.question = nn.Embedding(DIGITS, width)
        self.token = nn.Embedding(DIGITS + 1, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, DIGITS)

    def start(self, questions):
        return torch.tanh(self.question(questions[:, 0]) + 2 * self.question(questions[:, 1]))

    def logits(self, questions, answers):
        h = self.start(questions)
        previous = torch.full_like(answers[:, 0], DIGITS)
        rows = []
        for t in range(LENGTH):
            h = self.cell(self.token(previous), h)
            rows.append(self.head(h))
            previous = answers[:, t]
        return torch.stack(rows, dim=1)

    @torch.no_grad()
    def sample(self, questions, uniform):
        h = self.start(questions)
        previous = torch.full((len(questions),), DIGITS)
        tokens = []
        for t in range(LENGTH):
            h = self.cell(self.token(previous), h)
            cumulative = F.softmax(self.head(h), dim=-1).cumsum(-1)
            previous = (cumulative < uniform[:, t:t + 1]).sum(-1).clamp(max=DIGITS - 1)
            tokens.append(previous)
        return torch.stack(tokens, dim=1)


def reward(questions, answers):
    a, b = questions[:, 0], questions[:, 1]
    truth = torch.stack([(a + b) % 10, (a * b) % 10, (a - b) % 10], dim=1)
    exact = (truth == answers).double()
    near = ((truth - answers).abs() == 1).double()
    return exact.sum(1) + 0.3 * near.sum(1)


def gather_rollouts(x, world):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    return torch.stack(parts, dim=1).flatten()


def group_advantages(rewards):
    groups = rewards.view(RIDDLES, -1)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def token_logprob(policy, questions, answers):
    logp = F.log_softmax(policy.logits(questions, answers), dim=-1)
    return logp.gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    policy, reference = AnswerPolicy(), AnswerPolicy()
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    env = torch.Generator().manual_seed(71)

    for step in range(STEPS):
        riddles = torch.randint(0, DIGITS, (RIDDLES, 2), generator=env)
        uniform = torch.rand(RIDDLES * ROLLOUTS, LENGTH, generator=env)
        questions = riddles.repeat_interleave(ROLLOUTS, dim=0)[rank::world]
        answers = policy.sample(questions, uniform[rank::world])

        rewards = reward(questions, answers)
        all_rewards = gather_rollouts(rewards, world)
        advantages = group_advantages(rewards)

        logp = token_logprob(policy, questions, answers)
        with torch.no_grad():
            ref_logp = token_logprob(reference, questions, answers)
        ratio = torch.exp(logp - logp.detach())
        gap = ref_logp - logp
        kl = torch.exp(gap) - gap - 1
        loss = (KL_WEIGHT * kl - ratio * advantages.unsqueeze(1)).mean()

        optimizer.zero_grad()
        loss.backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1:3d} mean reward {all_rewards.mean().item():.6f}")

    if rank == 0:
        total = sum(p.detach().abs().sum() for p in policy.parameters())
        print(f"sum of |weights| {total.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
