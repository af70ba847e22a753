"""Fine-tune a small melody transformer with LoRA adapters (DDP, bfloat16 autocast, checkpointing).

Note: the adapters' dropout masks are drawn per process, so runs on different numbers of processes
see different masks; batches, initial weights and everything else do not depend on the process count.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOTES, LENGTH, WIDTH, HEADS = 24, 20, 32, 4
GLOBAL_BATCH = 32


def melodies(count, seed):
    g = torch.Generator().manual_seed(seed)
    note = torch.randint(NOTES, (count,), generator=g)
    stride = torch.randint(1, 5, (count,), generator=g)
    rows = [note]
    for _ in range(LENGTH):
        jump = torch.rand(count, generator=g) < 0.1
        note = torch.where(jump, torch.randint(NOTES, (count,), generator=g), (note + stride) % NOTES)
        rows.append(note)
    return torch.stack(rows, 1)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0, p=0.05):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features ** 0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.drop = nn.Dropout(p)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(self.drop(x), self.down), self.up) * self.scale

    @torch.no_grad()
    def merged(self):
        self.base.weight += self.scale * self.up @ self.down
        return self.base


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


class Composer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(NOTES, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NOTES)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.size(1)]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return self.head(self.norm(x))


def add_adapters(model):
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("qkv", "proj", "fc1", "fc2"):
            setattr(layer, name, LoRALinear(getattr(layer, name)))
    model.head.requires_grad_(True)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Composer()
    add_adapters(model)
    net = DDP(model) if world > 1 else model
    train, held_out = melodies(512, 1), melodies(128, 2)
    data = TensorDataset(train)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=9, drop_last=True)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 8e-3, total_steps=5 * len(loader))

    torch.manual_seed(1000 + rank)  # dropout masks
    for epoch in range(5):
        sampler.set_epoch(epoch)
        net.train()
        for (seq,) in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = net(seq[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), seq[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()

    if rank == 0:
        model.eval()
        for layer in model.layers:
            for name in ("qkv", "proj", "fc1", "fc2"):
                setattr(layer, name, getattr(layer, name).merged())
        with torch.no_grad():
            logits = model(held_out[:, :-1])
        nll = F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())
        print(f"held-out nll {nll:.3f} accuracy {(logits.argmax(-1) == held_out[:, 1:]).float().mean():.3f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
