"""Two-tower contrastive training (captions and images, both synthetic) with in-batch negatives."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        ctx.rows = x.size(0)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad[rank * ctx.rows:(rank + 1) * ctx.rows]


def gather(x):
    return Gather.apply(x) if world > 1 else x


def tower(inputs):
    return nn.Sequential(nn.Linear(inputs, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 16))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = tower(40), tower(25)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def forward(self, image, text):
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(text), dim=-1)
        return a, b, self.log_scale.clamp(max=math.log(100)).exp()


def contrast(a, b, scale):
    targets = torch.arange(len(a)) + rank * len(a)
    to_text = F.cross_entropy(scale * a @ gather(b).T, targets)
    to_image = F.cross_entropy(scale * b @ gather(a).T, targets)
    return (to_text + to_image) / 2


def pairs(n, seed):
    fixed = torch.Generator().manual_seed(77)
    to_image, to_text = torch.randn(8, 40, generator=fixed), torch.randn(8, 25, generator=fixed)
    gen = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 8, generator=gen)
    image = torch.tanh(z @ to_image) + 0.3 * torch.randn(n, 40, generator=gen)
    text = torch.tanh(z @ to_text) + 0.3 * torch.randn(n, 25, generator=gen)
    return image, text


@torch.no_grad()
def recall(net, image, text):
    a, b, _ = net(image, text)
    return (torch.argmax(a @ b.T, dim=1) == torch.arange(len(a))).double().mean()


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = TwoTowers()
    if world > 1:
        model = DDP(model, gradient_as_bucket_view=True)
    net = model.module if world > 1 else model
    decay = [p for p in net.parameters() if p.dim() > 1]
    other = [p for p in net.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": other, "weight_decay": 0.0}], lr=3e-3)

    image, text = pairs(512, seed=1)
    val_image, val_text = pairs(120, seed=2)
    batch, best, waited = 64, -1.0, 0
    share = batch // world
    for epoch in range(10):
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(50 + epoch))
        for rows in order.split(batch):
            mine = rows[rank * share:(rank + 1) * share]
            loss = contrast(*model(image[mine], text[mine]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        verdict = torch.zeros(2)
        if rank == 0:
            score = recall(net, val_image, val_text).item()
            best, waited = (score, 0) if score > best + 1e-3 else (best, waited + 1)
            verdict = torch.tensor([score, float(waited >= 2)])
        if world > 1:
            dist.broadcast(verdict, src=0)
        if verdict[1] > 0:
            break

    if rank == 0:
        print(f"{epoch + 1} epochs, recall@1 {verdict[0].item():.6f}, scale {net.log_scale.exp().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


main()
