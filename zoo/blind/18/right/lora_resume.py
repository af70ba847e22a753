"""Low-rank adapters on a frozen network, distilled from a larger frozen teacher, with a restart on the way."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS, STOP_AT, T = 32, 36, 17, 2.0


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(r, base.in_features) / base.in_features ** 0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


def network(width, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))
    return net.requires_grad_(False)


def adapted(seed):
    torch.manual_seed(seed)
    net = network(32, seed=100)
    for i, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            net[i] = LoRALinear(layer)
    return net


def wrap(net):
    if not dist.is_initialized():
        return net
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, frozen)
    return DistributedDataParallel(net)


def rows_of(step, n, rank, world):
    per_epoch = n // BATCH
    order = torch.randperm(n, generator=torch.Generator().manual_seed(step // per_epoch))
    return order[step % per_epoch * BATCH:(step % per_epoch + 1) * BATCH][rank::world]


def train(net, optimizer, scheduler, teacher, x, steps, rank, world):
    model = wrap(net)
    for step in steps:
        xb = x[rows_of(step, len(x), rank, world)]
        with torch.no_grad():
            target = F.softmax(teacher(xb) / T, dim=-1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(xb)
        loss = F.kl_div(F.log_softmax(logits.float() / T, dim=-1), target, reduction="batchmean") * T * T
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def optimiser(net):
    adapters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.2, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "adapters.pt")
    teacher = network(96, seed=200)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(2)
    x = torch.randn(320, 20, generator=torch.Generator().manual_seed(1))

    net = adapted(seed=0)
    optimizer, scheduler = optimiser(net)
    train(net, optimizer, scheduler, teacher, x, range(STOP_AT), rank, world)
    if rank == 0:
        adapters = {k: v for k, v in net.state_dict().items() if ".base." not in k}
        torch.save({"adapters": adapters, "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "step": STOP_AT}, path)
    if world > 1:
        dist.barrier()

    saved = torch.load(path, weights_only=True)
    net = adapted(seed=1)
    net.load_state_dict(saved["adapters"], strict=False)
    optimizer, scheduler = optimiser(net)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    train(net, optimizer, scheduler, teacher, x, range(saved["step"], STEPS), rank, world)

    held_out = torch.randn(256, 20, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        agree = (net(held_out).argmax(-1) == teacher(held_out).argmax(-1)).float().mean()
        gap = F.kl_div(F.log_softmax(net(held_out), -1), F.softmax(teacher(held_out), -1), reduction="batchmean")
    if rank == 0:
        print(f"agreement with teacher {agree:.3f}, divergence {gap:.4f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        os.remove(path)
        os.rmdir(folder[0])


if __name__ == "__main__":
    main()
