# Training with a bound on what every single row may contribute, plus noise (differential privacy).
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.func import functional_call, grad, vmap


@dataclass(frozen=True)
class Privacy:
    bound: float = 0.5
    sigma: float = 0.4


class PrivateStep:
    def __init__(self, net, lr, privacy, seed):
        self.net, self.lr, self.privacy = net, lr, privacy
        self.params = {k: v.detach().clone() for k, v in net.named_parameters()}
        self.noise = torch.Generator().manual_seed(seed)
        self.per_row = vmap(grad(self.loss), in_dims=(None, 0, 0))

    def loss(self, params, x, y):
        z = functional_call(self.net, params, (x.unsqueeze(0),)).squeeze()
        return nn.functional.binary_cross_entropy_with_logits(z, y)

    def __call__(self, x, y, rows_of_step):
        grads = self.per_row(self.params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (self.privacy.bound / norms).clamp(max=1.0)
        for name, p in self.params.items():
            total = torch.einsum("n,n...->...", factor, grads[name])
            dist.all_reduce(total)
            spread = self.privacy.bound * self.privacy.sigma
            total += spread * torch.randn(p.shape, generator=self.noise)
            p -= self.lr * total / rows_of_step
        return norms


def accuracy(step, x, y):
    z = functional_call(step.net, step.params, (x,)).squeeze(1)
    return ((z > 0).float() == y).float().mean().item()


def main(steps=40, batch=64):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 1))
    update = PrivateStep(net, 0.5, Privacy(), seed=99)
    params = update.params
    picks = torch.Generator().manual_seed(12)
    for i in range(steps):
        rows = torch.randperm(469, generator=picks)[:batch][rank::world]
        norms = update(x[rows], y[rows], batch)
        if i % 10 == 9:
            clipped = (norms > update.privacy.bound).float().sum()
            dist.all_reduce(clipped)
            if rank == 0:
                print(f"step {i + 1} clipped {int(clipped)}/{batch} test {accuracy(update, x[469:], y[469:]):.3f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
