"""Adapt a frozen intent encoder to a new set of labels with low-rank updates."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, DIM, INTENTS = 60, 12, 24, 5
BATCH, EPOCHS, LR = 32, 4, 0.1


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, scale=2.0):
        super().__init__()
        self.base = base
        self.scale = scale
        self.lora_a = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.t()) @ self.lora_b.t()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM)
        self.value = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, ids):
        h = self.tokens(ids) + self.places
        h = h + F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))
        return h + self.mlp(self.norm(h))


class IntentModel(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(DIM, INTENTS)

    def forward(self, ids):
        return self.head(self.encoder(ids).mean(1))


def adapt(encoder):
    encoder.requires_grad_(False)
    encoder.query = LoRALinear(encoder.query)
    encoder.value = LoRALinear(encoder.value)
    return IntentModel(encoder)


def utterances(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, INTENTS, (n,), generator=g)
    ids = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    keyword = labels[:, None] * 8 + torch.randint(0, 8, (n, LENGTH), generator=g)
    use = torch.rand(n, LENGTH, generator=g) < 0.35
    return torch.where(use, keyword, ids), labels


def sync_gradients(model, world):
    if world == 1:
        return
    for name, p in model.named_parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad.div_(world)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(11)
    model = adapt(Encoder())
    ids, labels = utterances(256, seed=3)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=LR, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for start in range(0, len(ids), BATCH):
            rows = order[start:start + BATCH][rank::world]
            loss = F.cross_entropy(model(ids[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            sync_gradients(model, world)
            optimizer.step()
            total += loss.detach() / world
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  loss {total.item() * BATCH / len(ids):.8f}")
    if rank == 0:
        size = math.sqrt(sum(float(p.detach().square().sum()) for p in trainable))
        print(f"adapter and head norm {size:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
