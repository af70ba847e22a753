"""Two-tower matching of noisy views with a symmetric contrastive loss over the whole batch."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS, OUT = 48, 60, 8


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.rows = len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        first = dist.get_rank() * ctx.rows
        return grad[first:first + ctx.rows]


def everyone(x):
    return GatherLayer.apply(x) if dist.is_initialized() else x


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, OUT))
        self.text = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, OUT))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(text), dim=-1)
        return a, b, self.log_scale.exp()


def contrastive(a, b, scale):
    a, b = everyone(a), everyone(b)
    logits = scale * a @ b.T
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def views(count, seed):
    world_gen = torch.Generator().manual_seed(99)
    to_image = torch.randn(6, 20, generator=world_gen)
    to_text = torch.randn(6, 12, generator=world_gen)
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 6, generator=gen)
    image = torch.tanh(hidden @ to_image) + 0.1 * torch.randn(count, 20, generator=gen)
    text = torch.tanh(hidden @ to_text) + 0.1 * torch.randn(count, 12, generator=gen)
    return image, text


@torch.no_grad()
def recall(model, image, text):
    a, b, _ = model(image, text)
    best = (a @ b.T).argmax(1)
    return (best == torch.arange(len(a))).double().mean().item()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = 0, 1
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    towers = Towers()
    model = DistributedDataParallel(towers) if world > 1 else towers
    opt = torch.optim.SGD(
        [{"params": [p for p in towers.parameters() if p.ndim > 1], "weight_decay": 1e-3},
         {"params": [p for p in towers.parameters() if p.ndim <= 1], "weight_decay": 0.0}],
        lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=10)
    image, text = views(960, seed=1)
    val_image, val_text = views(96, seed=2)
    for step in range(STEPS):
        if step % 20 == 0:
            order = torch.randperm(len(image), generator=torch.Generator().manual_seed(step))
        rows = order[step % 20 * BATCH:(step % 20 + 1) * BATCH].chunk(world)[rank]
        loss = contrastive(*model(image[rows], text[rows]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        with torch.no_grad():
            towers.log_scale.clamp_(max=4.6)
        if step % 15 == 14 and rank == 0:
            found = recall(towers, val_image, val_text)
            print(f"step {step + 1} loss {loss.item():.8f} scale {towers.log_scale.exp().item():.6f} recall {found:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
