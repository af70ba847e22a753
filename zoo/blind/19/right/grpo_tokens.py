"""GRPO on a toy completion task: prompts are dealt to ranks, each group of completions stays on one rank."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, EOS, PROMPT, MAX_NEW = 9, 8, 3, 6
PROMPTS_PER_STEP, GROUP, STEPS, INNER = 12, 6, 14, 2
CLIP_LOW, CLIP_HIGH, KL_COEF = 0.2, 0.28, 0.02


class Policy(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class Comm:
    def __init__(self):
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        if self.world > 1:
            dist.init_process_group("gloo")

    def sum(self, value):
        value = torch.as_tensor(value, dtype=torch.float64).clone()
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def sum_gradients(self, module):
        if self.world > 1:
            for work in [dist.all_reduce(p.grad, async_op=True) for p in module.parameters()]:
                work.wait()


def prompts_for(step):
    g = torch.Generator().manual_seed(40_000 + step)
    return torch.randint(0, EOS, (PROMPTS_PER_STEP, PROMPT), generator=g)


@torch.no_grad()
def generate(policy, prompt, generator):
    """GROUP samples of one prompt; the noise belongs to the prompt, not to the rank."""
    ids = prompt.expand(GROUP, -1)
    alive = torch.ones(GROUP, dtype=torch.bool)
    mask = []
    for _ in range(MAX_NEW):
        probs = policy(ids)[:, -1].softmax(-1)
        nxt = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        nxt = torch.where(alive, nxt, EOS)
        mask.append(alive)
        alive = alive & (nxt != EOS)
        ids = torch.cat([ids, nxt[:, None]], 1)
    return ids, torch.stack(mask, 1)


def reward(ids, mask):
    """Wanted: keep counting up from the last prompt token, four tokens long, then stop."""
    want = (ids[:, PROMPT - 1:PROMPT] + torch.arange(1, MAX_NEW + 1)) % EOS
    got = ids[:, PROMPT:]
    right = ((got == want) & mask).sum(1).double()
    length = (mask & (got != EOS)).sum(1)
    return right / 4 - 0.25 * (length - 4).abs().double()


def token_logp(policy, ids):
    logits = policy(ids[:, :-1])[:, PROMPT - 1:]
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


def rollout(policy, step, comm):
    ids, masks, advs, scores = [], [], [], []
    for number, prompt in enumerate(prompts_for(step)):
        if number % comm.world != comm.rank:
            continue
        g = torch.Generator().manual_seed(1_000_000 + step * 1000 + number)
        seq, mask = generate(policy, prompt, g)
        r = reward(seq, mask)
        ids.append(seq)
        masks.append(mask)
        scores.append(r)
        advs.append((r - r.mean()) / (r.std() + 1e-4))
    return torch.cat(ids), torch.cat(masks).double(), torch.cat(advs), torch.cat(scores)


def main():
    torch.set_default_dtype(torch.float64)
    comm = Comm()
    torch.manual_seed(17)
    policy = Policy()
    warm = torch.optim.Adam(policy.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(18)
    for _ in range(15):  # a short supervised start, the same work on every rank
        start = torch.randint(0, EOS, (64, 1), generator=g)
        seq = (start + torch.arange(PROMPT + MAX_NEW)) % EOS
        loss = F.cross_entropy(policy(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        warm.zero_grad()
        loss.backward()
        warm.step()
    reference = copy.deepcopy(policy).requires_grad_(False)

    optim = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(STEPS):
        ids, mask, adv, scores = rollout(policy, step, comm)
        with torch.no_grad():
            old, ref = token_logp(policy, ids), token_logp(reference, ids)
        tokens = comm.sum(mask.sum())
        for _ in range(INNER):
            logp = token_logp(policy, ids)
            ratio = (logp - old).exp()
            gain = torch.minimum(ratio * adv[:, None],
                                 ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * adv[:, None])
            kl = (ref - logp).exp() - (ref - logp) - 1
            loss = ((KL_COEF * kl - gain) * mask).sum() / tokens
            optim.zero_grad()
            loss.backward()
            comm.sum_gradients(policy)
            norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optim.step()
        mean_reward = comm.sum(scores.sum()) / (PROMPTS_PER_STEP * GROUP)
        mean_kl = comm.sum((kl.detach() * mask).sum()) / tokens
        if comm.rank == 0 and step % 3 == 1:
            print(f"step {step} reward {mean_reward:.8f} kl {mean_kl:.10f} "
                  f"tokens {int(tokens)} grad {norm:.10f}")
    if comm.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
