"""PPO on a small grid. Each process has its own environments; the update averages gradients over processes."""
import time
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
cfg = SimpleNamespace(size=5, envs=8, horizon=16, iters=4, epochs=3, minibatches=4, gamma=0.97, lam=0.95, clip=0.2,
                      vf=0.5, ent=0.01, lr=3e-3, max_kl=0.05, seed=31)


class Grid:
    MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])

    def __init__(self, n, size, seed):
        self.n, self.size = n, size
        self.rng = np.random.default_rng(seed)
        self.pos = self.rng.integers(0, size, (n, 2))
        self.goal = self.rng.integers(0, size, (n, 2))

    def obs(self):
        return torch.tensor(np.concatenate([self.pos, self.goal, self.goal - self.pos], 1), dtype=torch.float32) / self.size

    def step(self, act):
        before = np.abs(self.goal - self.pos).sum(1)
        self.pos = np.clip(self.pos + self.MOVES[act], 0, self.size - 1)
        after = np.abs(self.goal - self.pos).sum(1)
        done = after == 0
        reward = 0.2 * (before - after) - 0.05 + done
        k = int(done.sum())
        if k:
            self.goal[done] = self.rng.integers(0, self.size, (k, 2))
        return torch.tensor(reward, dtype=torch.float32), torch.tensor(done)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.pi = nn.Linear(48, 4)
        self.v = nn.Linear(48, 1)

    def forward(self, o):
        h = self.trunk(o)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def rollout(net, env, gen):
    keys = ("o", "a", "lp", "v", "r", "d")
    buf = {k: [] for k in keys}
    for _ in range(cfg.horizon):
        o = env.obs()
        logits, v = net(o)
        a = torch.multinomial(logits.softmax(-1), 1, generator=gen).squeeze(1)
        r, d = env.step(a.numpy())
        for k, t in zip(keys, (o, a, Categorical(logits=logits).log_prob(a), v, r, d)):
            buf[k].append(t)
    b = {k: torch.stack(t) for k, t in buf.items()}
    nxt = net(env.obs())[1]
    adv, last = torch.zeros_like(b["r"]), torch.zeros(env.n)
    for t in reversed(range(cfg.horizon)):
        alive = 1.0 - b["d"][t].float()
        delta = b["r"][t] + cfg.gamma * nxt * alive - b["v"][t]
        last = delta + cfg.gamma * cfg.lam * alive * last
        adv[t], nxt = last, b["v"][t]
    b["adv"], b["ret"] = adv, adv + b["v"]
    return {k: t.flatten(0, 1) for k, t in b.items()}


def standardize(t):
    s = torch.stack([t.sum(), t.pow(2).sum(), torch.tensor(float(t.numel()))]).double()
    dist.all_reduce(s)
    mean = s[0] / s[2]
    std = (s[1] / s[2] - mean ** 2).clamp(min=1e-12).sqrt()
    return ((t - mean) / (std + 1e-8)).float()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    net = Policy()
    ddp = DDP(net)
    opt = torch.optim.Adam(ddp.parameters(), lr=cfg.lr, eps=1e-5)
    env = Grid(cfg.envs, cfg.size, seed=[cfg.seed, rank])
    gen = torch.Generator().manual_seed(cfg.seed * 7919 + rank)

    for it in range(cfg.iters):
        for g in opt.param_groups:
            g["lr"] = cfg.lr * (1 - it / cfg.iters)
        data = rollout(net, env, gen)
        data["adv"] = standardize(data["adv"])
        n = len(data["adv"])
        used = 0
        for ep in range(cfg.epochs):
            kls = torch.zeros(1)
            for idx in torch.randperm(n, generator=gen).chunk(cfg.minibatches):
                logits, v = ddp(data["o"][idx])
                pi = Categorical(logits=logits)
                logratio = pi.log_prob(data["a"][idx]) - data["lp"][idx]
                ratio = logratio.exp()
                adv = data["adv"][idx]
                pg = -torch.min(ratio * adv, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * adv).mean()
                loss = pg + cfg.vf * (v - data["ret"][idx]).pow(2).mean() - cfg.ent * pi.entropy().mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
                opt.step()
                kls += ((ratio - 1) - logratio).mean().detach()
            used += 1
            dist.all_reduce(kls)
            kl = kls.item() / (world * cfg.minibatches)
            if kl > cfg.max_kl:
                break
        stat = torch.tensor([data["r"].sum().item(), float(n), data["d"].sum().item()])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"iter {it}: reward/step {stat[0] / stat[1]:+.4f} goals {int(stat[2])} steps {int(stat[1])} kl {kl:.4f} epochs {used}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
