import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


@dataclass
class Args:
    seed: int = 1
    num_envs: int = 16
    num_steps: int = 48
    num_iterations: int = 6
    num_minibatches: int = 4
    update_epochs: int = 3
    learning_rate: float = 3e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float = 0.03


class PoleEnvs:
    def __init__(self, ids, seed):
        self.rngs = [np.random.default_rng([seed, i]) for i in ids]
        self.state = np.stack([r.uniform(-0.05, 0.05, 4) for r in self.rngs])
        self.length = np.zeros(len(self.rngs), dtype=np.int64)

    def draw(self):
        return np.array([r.random() for r in self.rngs])

    def step(self, action):
        x, v, th, om = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        temp = (force + 0.05 * om ** 2 * np.sin(th)) / 1.1
        acc = (9.8 * np.sin(th) - np.cos(th) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(th) ** 2 / 1.1))
        xacc = temp - 0.05 * acc * np.cos(th) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * xacc, th + 0.02 * om, om + 0.02 * acc], axis=1)
        self.length += 1
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21) | (self.length >= 100)
        finished = self.length[done].copy()
        for i in np.flatnonzero(done):
            self.state[i] = self.rngs[i].uniform(-0.05, 0.05, 4)
        self.length[done] = 0
        return self.state.copy(), np.ones(len(done)), done, finished


def layer_init(layer, std=np.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 32)), nn.Tanh(), layer_init(nn.Linear(32, 1), 1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(4, 32)), nn.Tanh(), layer_init(nn.Linear(32, 2), 0.01))


def total_over_ranks(*values):
    t = torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in values])
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


if __name__ == "__main__":
    args = Args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(args.seed)
    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    local_envs = args.num_envs // world_size
    envs = PoleEnvs(range(rank * local_envs, (rank + 1) * local_envs), args.seed)
    shuffler = torch.Generator().manual_seed(args.seed)
    T, next_obs, next_done = args.num_steps, torch.tensor(envs.state), torch.zeros(local_envs)

    for iteration in range(args.num_iterations):
        optimizer.param_groups[0]["lr"] = (1 - iteration / args.num_iterations) * args.learning_rate
        obs, actions = torch.zeros(T, local_envs, 4), torch.zeros(T, local_envs, dtype=torch.long)
        logprobs, rewards, dones, values = (torch.zeros(T, local_envs) for _ in range(4))
        lengths = []
        with torch.no_grad():
            for t in range(T):
                obs[t], dones[t] = next_obs, next_done
                pi, values[t] = Categorical(logits=agent.actor(next_obs)), agent.critic(next_obs).flatten()
                actions[t] = (torch.tensor(envs.draw()) < pi.probs[:, 1]).long()
                logprobs[t] = pi.log_prob(actions[t])
                state, reward, done, finished = envs.step(actions[t].numpy())
                lengths.extend(finished.tolist())
                rewards[t], next_obs, next_done = torch.tensor(reward), torch.tensor(state), torch.tensor(done).double()
            advantages, lastgaelam = torch.zeros_like(rewards), 0
            next_value = agent.critic(next_obs).flatten()
            for t in reversed(range(T)):
                alive = 1 - (next_done if t == T - 1 else dones[t + 1])
                following = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * following * alive - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * alive * lastgaelam
            returns = advantages + values

        for epoch in range(args.update_epochs):
            kl_sum, kl_count = 0.0, 0
            for rows in torch.randperm(T, generator=shuffler).chunk(args.num_minibatches):
                o, a = obs[rows].flatten(0, 1), actions[rows].flatten()
                adv, ret, old = advantages[rows].flatten(), returns[rows].flatten(), logprobs[rows].flatten()
                s, n = total_over_ranks(adv.sum(), len(adv))
                mean = s / n
                std = (total_over_ranks(((adv - mean) ** 2).sum())[0] / (n - 1)).sqrt()
                adv = (adv - mean) / (std + 1e-8)
                pi = Categorical(logits=agent.actor(o))
                logratio = pi.log_prob(a) - old
                ratio = logratio.exp()
                kl_sum += ((ratio - 1) - logratio).sum().item()
                kl_count += len(a)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v_loss = 0.5 * ((agent.critic(o).flatten() - ret) ** 2).mean()
                loss = pg_loss - args.ent_coef * pi.entropy().mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    all_grads = torch.cat([p.grad.view(-1) for p in agent.parameters()])
                    dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for p in agent.parameters():
                        p.grad.copy_(all_grads[offset:offset + p.numel()].view_as(p.grad) / world_size)
                        offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            kl_sum, kl_count = total_over_ranks(kl_sum, kl_count).tolist()
            if kl_sum / kl_count > args.target_kl:
                break
        ep_sum, ep_count = total_over_ranks(float(sum(lengths)), len(lengths)).tolist()
        if rank == 0:
            print(f"iteration {iteration} episodes {int(ep_count)} mean length {ep_sum / ep_count:.4f} kl {kl_sum / kl_count:.6f}")
    if world_size > 1:
        dist.destroy_process_group()
