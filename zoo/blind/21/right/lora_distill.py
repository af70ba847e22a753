"""Low-rank adapters on a frozen network, distilled from a wider teacher in bfloat16 autocast."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

IN, HID, OUT, RANK_LOW, BATCH, STEPS = 16, 64, 6, 4, 64, 30


class LoRA(nn.Module):
    def __init__(self, base, r=RANK_LOW, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / base.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def mlp(width, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, OUT))


def adapt(net):
    for i, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            net[i] = LoRA(layer)
    return net


class GradientSync:
    """One flat float buffer for the adapter gradients."""

    def __init__(self, params, world):
        self.params, self.world = params, world
        self.flat = torch.zeros(sum(p.numel() for p in params))

    def __call__(self):
        torch.cat([p.grad.flatten() for p in self.params], out=self.flat)
        if self.world > 1:
            dist.all_reduce(self.flat)
            self.flat.div_(self.world)
        for p, part in zip(self.params, self.flat.split([p.numel() for p in self.params])):
            p.grad.copy_(part.view_as(p))


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    teacher = mlp(96, seed=10).requires_grad_(False).eval()
    student = adapt(mlp(HID, seed=11))
    params = [p for p in student.parameters() if p.requires_grad]
    opt = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=STEPS, cycle_momentum=False)
    sync = GradientSync(params, world)
    g = torch.Generator().manual_seed(60)
    pool = torch.randn(1024, IN, generator=g)
    held = torch.randn(256, IN, generator=g)
    temp = 2.0

    def distance(x):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            want = teacher(x) * 3
        with torch.autocast("cpu", dtype=torch.bfloat16):
            have = student(x)
        return F.kl_div((have.float() / temp).log_softmax(1), (want.float() / temp).softmax(1),
                        reduction="batchmean") * temp ** 2

    for step in range(STEPS):
        ids = torch.randint(0, len(pool), (BATCH,), generator=g)
        loss = distance(pool[ids[rank::world]])
        opt.zero_grad()
        loss.backward()
        sync()
        opt.step()
        sched.step()
        if step % 7 == 0:
            mean = loss.detach() / world
            if world > 1:
                dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} kl {mean:.3f}")
    with torch.no_grad():
        value = distance(held)
    if rank == 0:
        print(f"held out kl {value:.3f} adapter parameters {sum(p.numel() for p in params)}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
