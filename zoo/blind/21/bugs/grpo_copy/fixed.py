"""Group-relative policy optimisation of a tiny recurrent policy: answer a prompt
(a digit string) with its reversal. Several completions per prompt form a group;
the completions of a group are dealt out over the processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
PROMPTS, GROUP, LENGTH, SYMBOLS = 6, 8, 4, 5
ITERATIONS = 20


class Policy(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS + 1, hidden)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.cell = nn.GRUCell(hidden, hidden)
        self.out = nn.Linear(hidden, SYMBOLS)

    def start(self, prompt):
        return self.encoder(self.symbol(prompt))[1][0]

    def step(self, token, state):
        state = self.cell(self.symbol(token), state)
        return F.log_softmax(self.out(state), -1), state

    @torch.no_grad()
    def sample(self, prompt, gumbel):
        state = self.start(prompt)
        token = torch.full((len(prompt),), SYMBOLS)
        tokens = []
        for t in range(LENGTH):
            logp, state = self.step(token, state)
            token = (logp + gumbel[:, t]).argmax(-1)
            tokens.append(token)
        return torch.stack(tokens, 1)

    def logprob(self, prompt, answer):
        state = self.start(prompt)
        token = torch.full((len(prompt),), SYMBOLS)
        total = []
        for t in range(LENGTH):
            logp, state = self.step(token, state)
            token = answer[:, t]
            total.append(logp.gather(1, token[:, None])[:, 0])
        return torch.stack(total, 1)


def gather_all(x):
    """Values of every completion, in the order of their global index."""
    if WORLD == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts, 1).flatten()


def standardise(rewards):
    groups = rewards.view(PROMPTS, -1)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def average_gradients(model):
    if WORLD > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= WORLD


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3, momentum=0.8)
    mine = torch.arange(PROMPTS * GROUP)[RANK::WORLD]

    for iteration in range(ITERATIONS):
        gen = torch.Generator().manual_seed(100 + iteration)
        prompts = torch.randint(0, SYMBOLS, (PROMPTS, LENGTH), generator=gen)
        prompts = prompts.repeat_interleave(GROUP, 0)[mine]
        uniform = torch.rand(PROMPTS * GROUP, LENGTH, SYMBOLS, generator=gen)[mine]
        answers = policy.sample(prompts, -torch.log(-torch.log(uniform + 1e-12)))

        rewards = (answers == prompts.flip(1)).double().mean(1)
        rewards = rewards + 0.1 * (answers[:, 0] == prompts[:, -1]).double()
        everyone = gather_all(rewards)
        advantages = standardise(everyone)[RANK::WORLD]

        for _ in range(2):
            logp = policy.logprob(prompts, answers)
            if _ == 0:
                old = logp.detach()
            ratio = (logp - old).exp()
            surrogate = torch.minimum(ratio * advantages[:, None],
                                      ratio.clamp(0.8, 1.2) * advantages[:, None])
            loss = -surrogate.mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(policy)
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()

        if RANK == 0 and iteration % 4 == 3:
            print(f"iteration {iteration + 1:2d}  mean reward {everyone.mean().item():.8f}")

    if RANK == 0:
        norm = sum(p.detach().pow(2).sum() for p in policy.parameters()).sqrt().item()
        print(f"policy norm {norm:.10f}")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
