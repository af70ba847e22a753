# PPO on a numpy cart-pole; the vector environments are split between the processes
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
import torch.distributed as dist
from torch.distributions.categorical import Categorical


@dataclass
class Args:
    seed: int = 1
    num_envs: int = 8
    num_steps: int = 32
    num_updates: int = 8
    num_minibatches: int = 4
    update_epochs: int = 3
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float = 0.05


class CartPole:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.s, self.t = self.rng.uniform(-0.05, 0.05, 4), 0
        return self.s.astype(np.float32)

    def step(self, a):
        x, xd, th, thd = self.s
        f = 10.0 if a == 1 else -10.0
        tmp = (f + 0.05 * thd ** 2 * np.sin(th)) / 1.1
        tha = (9.8 * np.sin(th) - np.cos(th) * tmp) / (0.5 * (4 / 3 - 0.1 * np.cos(th) ** 2 / 1.1))
        xa = tmp - 0.05 * tha * np.cos(th) / 1.1
        self.s = np.array([x + 0.02 * xd, xd + 0.02 * xa, th + 0.02 * thd, thd + 0.02 * tha])
        self.t += 1
        done = abs(self.s[0]) > 2.4 or abs(self.s[2]) > 0.209 or self.t >= 200
        return (self.reset() if done else self.s.astype(np.float32)), 1.0, float(done)


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 32)), nn.Tanh(), layer_init(nn.Linear(32, 1), 1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(4, 32)), nn.Tanh(), layer_init(nn.Linear(32, 2), 0.01))


if __name__ == "__main__":
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="30102").items():
        os.environ.setdefault(k, v)
    args = Args()
    dist.init_process_group("gloo")
    local_rank, world_size = dist.get_rank(), dist.get_world_size()
    local_num_envs = args.num_envs // world_size

    # the same weights everywhere, then decorrelate the processes
    torch.manual_seed(args.seed)
    agent = Agent()
    opt = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    args.seed += local_rank
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    env_ids = range(local_rank * local_num_envs, (local_rank + 1) * local_num_envs)
    envs = [CartPole(100 + i) for i in env_ids]
    action_rngs = [np.random.default_rng(500 + i) for i in env_ids]
    order_rng = np.random.default_rng(7)  # shared by all processes

    T, E = args.num_steps, local_num_envs
    next_obs = torch.tensor(np.stack([e.reset() for e in envs]))
    next_done = torch.zeros(E)
    global_step = 0
    for update in range(1, args.num_updates + 1):
        opt.param_groups[0]["lr"] = (1.0 - (update - 1.0) / args.num_updates) * args.learning_rate
        obs, actions = torch.zeros(T, E, 4), torch.zeros(T, E)
        logprobs, rewards, dones, values = (torch.zeros(T, E) for _ in range(4))
        for step in range(T):
            global_step += E * world_size
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                dist_ = Categorical(logits=agent.actor(next_obs))
                u = torch.tensor([r.random() for r in action_rngs])
                action = (u > dist_.probs[:, 0]).float()
                values[step] = agent.critic(next_obs).flatten()
            actions[step], logprobs[step] = action, dist_.log_prob(action)
            o, r, d = zip(*[e.step(int(a)) for e, a in zip(envs, action)])
            next_obs, rewards[step], next_done = torch.tensor(np.stack(o)), torch.tensor(r), torch.tensor(d)
        with torch.no_grad():
            next_value = agent.critic(next_obs).flatten()
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(T)):
                nonterm = 1.0 - (next_done if t == T - 1 else dones[t + 1])
                nv = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * nv * nonterm - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * nonterm * last
            returns = advantages + values

        for epoch in range(args.update_epochs):
            for mb in np.array_split(order_rng.permutation(T), args.num_minibatches):
                logits = agent.actor(obs[mb])
                d = Categorical(logits=logits)
                logratio = d.log_prob(actions[mb]) - logprobs[mb]
                ratio = logratio.exp()
                a = advantages[mb]
                m = torch.stack([a.sum(), (a * a).sum(), torch.tensor(float(a.numel()))])
                dist.all_reduce(m)
                mean = m[0] / m[2]
                a = (a - mean) / ((m[1] / m[2] - mean ** 2).clamp_min(0).sqrt() + 1e-8)
                pg_loss = torch.max(-a * ratio, -a * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v_loss = 0.5 * ((agent.critic(obs[mb]).squeeze(-1) - returns[mb]) ** 2).mean()
                loss = pg_loss - args.ent_coef * d.entropy().mean() + v_loss * args.vf_coef
                opt.zero_grad()
                loss.backward()
                all_grads = torch.cat([p.grad.view(-1) for p in agent.parameters()])
                dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                offset = 0
                for p in agent.parameters():
                    p.grad.data.copy_(all_grads[offset:offset + p.numel()].view_as(p.grad.data) / world_size)
                    offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                opt.step()
            approx_kl = ((ratio - 1) - logratio).mean().detach()
            dist.all_reduce(approx_kl)
            if approx_kl / world_size > args.target_kl:
                break
        stats = torch.tensor([dones.sum().item(), float(T * E)])
        dist.all_reduce(stats)
        if local_rank == 0:
            print(f"update={update} global_step={global_step} episodes={int(stats[0])} kl={approx_kl / world_size:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()
