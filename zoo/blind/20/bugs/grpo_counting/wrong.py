"""Group relative policy optimisation of a small token policy that must learn to count upwards from the prompt."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

VOCAB, LENGTH, DIM = 10, 6, 32
PROMPTS, GROUP = 6, 8
STEPS, INNER = 25, 2
CLIP, BETA = 0.2, 0.01


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.cell = nn.GRUCell(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def step(self, token, state):
        state = self.cell(self.embed(token), state)
        return self.head(state), state

    def log_probs(self, prompt, completion):
        state = torch.zeros(len(prompt), DIM)
        token, out = prompt, []
        for t in range(LENGTH):
            logits, state = self.step(token, state)
            token = completion[:, t]
            out.append(logits.log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1))
        return torch.stack(out, dim=1)

    @torch.no_grad()
    def sample(self, prompt, gumbel):
        state = torch.zeros(len(prompt), DIM)
        token, out = prompt, []
        for t in range(LENGTH):
            logits, state = self.step(token, state)
            token = (logits + gumbel[:, t]).argmax(-1)
            out.append(token)
        return torch.stack(out, dim=1)


def reward(prompt, completion):
    target = (prompt.unsqueeze(1) + torch.arange(1, LENGTH + 1)) % VOCAB
    hits = (completion == target).double().mean(1)
    return hits + 0.2 * (completion[:, 1:] != completion[:, :-1]).double().mean(1)


def gathered(scores, world):
    """[PROMPTS, completions of this rank] -> [PROMPTS, GROUP]"""
    if world == 1:
        return scores
    parts = [torch.empty_like(scores) for _ in range(world)]
    dist.all_gather(parts, scores)
    return torch.cat(parts, dim=1)


def advantages(scores, world):
    group = scores
    mean = group.mean(1, keepdim=True)
    std = group.std(1, keepdim=True)
    return (scores - mean) / (std + 1e-4)


def rollout_noise(step, rank, world):
    gen = torch.Generator().manual_seed(30_000 + step)
    prompts = torch.randint(VOCAB, (PROMPTS,), generator=gen)
    uniform = torch.rand(PROMPTS, GROUP, LENGTH, VOCAB, generator=gen).clamp(1e-12, 1 - 1e-12)
    gumbel = -torch.log(-torch.log(uniform))
    return prompts, gumbel.chunk(world, dim=1)[rank]


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(8)
    policy, reference = Policy(), Policy()
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    per_rank = GROUP // world

    for step in range(STEPS):
        prompts, gumbel = rollout_noise(step, rank, world)
        prompt = prompts.repeat_interleave(per_rank)
        completion = policy.sample(prompt, gumbel.flatten(0, 1))
        scores = reward(prompt, completion).view(PROMPTS, per_rank)
        advantage = advantages(scores, world).flatten()
        with torch.no_grad():
            old = policy.log_probs(prompt, completion)
            ref = reference.log_probs(prompt, completion)

        for _ in range(INNER):
            new = policy.log_probs(prompt, completion)
            ratio = (new - old).exp()
            adv = advantage.unsqueeze(1)
            surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv)
            kl = (ref - new).exp() - (ref - new) - 1
            loss = -(surrogate - BETA * kl).mean()
            optimizer.zero_grad()
            loss.backward()
            if world > 1:
                for p in policy.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
            optimizer.step()

        mean_score = gathered(scores, world).mean().item()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} reward {mean_score:.6f}")

    weight = sum(p.detach().pow(2).sum() for p in policy.parameters()).sqrt().item()
    if rank == 0:
        print(f"weight norm {weight:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
