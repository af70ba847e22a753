import os, time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_digits


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, adaptive=False, **kwargs):
        assert rho >= 0.0, f"Invalid rho, should be non-negative: {rho}"
        defaults = dict(rho=rho, adaptive=adaptive, **kwargs)
        super().__init__(params, defaults)
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)  # climb to the local maximum "w + e(w)"
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]  # get back to "w" from "w + e(w)"
        self.base_optimizer.step()  # do the actual "sharpness-aware" update
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self):
        return torch.norm(torch.stack([((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2)
                                       for group in self.param_groups for p in group["params"] if p.grad is not None]), p=2)


class ConvMixer(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 2, 2)
        self.depth = nn.ModuleList([nn.Conv2d(dim, dim, 3, padding=1, groups=dim) for _ in range(depth)])
        self.point = nn.ModuleList([nn.Conv2d(dim, dim, 1) for _ in range(depth)])
        self.norm = nn.ModuleList([nn.GroupNorm(3, dim) for _ in range(depth)])
        self.head = nn.Linear(dim * 16, 10)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        for d, p, n in zip(self.depth, self.point, self.norm):
            x = x + F.gelu(d(x))
            x = n(F.gelu(p(x)))
        return self.head(x.flatten(1))


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30119")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    model = DDP(ConvMixer())
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.15, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt.base_optimizer, T_max=60)
    bs = 80
    for epoch in range(3):
        perm = torch.randperm(1600, generator=torch.Generator().manual_seed(epoch + 1))
        running = torch.zeros(2)
        for k in range(20):
            # interleaved, so that process r sees elements r, r + world, ...
            b = perm[k * bs + rank:(k + 1) * bs:world]
            loss = F.cross_entropy(model(x[b]), y[b], label_smoothing=0.1)
            loss.backward()
            # Both backward passes go through DDP's reducer; the ascent direction is that of the global batch and the
            # perturbed weights stay equal everywhere. (Foret et al. use one direction per accelerator, m-sharpness; we don't.)
            opt.first_step(zero_grad=True)
            second = F.cross_entropy(model(x[b]), y[b], label_smoothing=0.1)
            second.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.second_step(zero_grad=True)
            sched.step()
            running += torch.stack([loss, second]).detach()
        dist.all_reduce(running)
        model.eval()
        with torch.no_grad():
            acc = (model.module(x[1600:]).argmax(1) == y[1600:]).float().mean()
        model.train()
        if rank == 0:
            print(f"epoch {epoch} loss {running[0] / 20 / world:.5f} perturbed {running[1] / 20 / world:.5f} acc {acc:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
