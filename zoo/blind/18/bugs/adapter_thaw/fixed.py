"""Fine-tune a frozen text encoder with low-rank adapters; after the first third the norms and the head bias thaw as well."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WIDTH, RANKS, BATCH, STEPS, THAW = 32, 4, 32, 36, 12


class Adapted(nn.Module):
    def __init__(self, base, alpha=8.0):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANKS, base.in_features) / base.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANKS))
        self.scale = alpha / RANKS

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(200, WIDTH, mode="mean")
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def pretrained():
    torch.manual_seed(77)
    model = Encoder().requires_grad_(False)
    torch.manual_seed(78)
    for layer in model.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    model.head.weight.requires_grad_(True)
    return model


def late_parameters(model):
    return [p for n, p in model.named_parameters() if "norm" in n or n == "head.bias"]


def reduce_gradients(params):
    world = dist.get_world_size()
    for p in params:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world


def documents(count, seed):
    gen = torch.Generator().manual_seed(seed)
    label = torch.randint(3, (count,), generator=gen)
    ids = torch.randint(200, (count, 10), generator=gen)
    topical = torch.randint(60, (count, 10), generator=gen) + 60 * label[:, None]
    return torch.where(torch.rand(count, 10, generator=gen) < 0.4, topical, ids), label


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    model = pretrained()
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
    ids, label = documents(BATCH * STEPS, seed=1)
    test_ids, test_label = documents(300, seed=2)
    for step in range(STEPS):
        if step == THAW:
            late = late_parameters(model)
            for p in late:
                p.requires_grad_(True)
            opt.add_param_group({"params": late, "lr": 2e-3})
        rows = slice(step * BATCH + rank * BATCH // world, step * BATCH + (rank + 1) * BATCH // world)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[rows])
        loss = F.cross_entropy(logits.float(), label[rows])
        opt.zero_grad()
        loss.backward()
        if world > 1:
            reduce_gradients(model.parameters())
        opt.step()
        if step % 12 == 11:
            model.eval()
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(test_ids).float()
            model.train()
            if rank == 0:
                right = (out.argmax(1) == test_label).float().mean().item()
                print(f"step {step + 1}: test loss {F.cross_entropy(out, test_label).item():.4f} accuracy {right:.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
