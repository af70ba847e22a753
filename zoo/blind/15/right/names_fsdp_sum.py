"""A small causal language model over names of towns, FSDP2. The loss is a sum over the letters, divided by the letters
of the whole batch, so gradients have to be added up: FSDP's division by the number of processes is switched off.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, LONGEST, BATCH, EPOCHS = 24, 16, 32, 4
PAD = -100


def towns(n, seed):
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.15), VOCAB)
    out = []
    for _ in range(n):
        name = [0]
        for _ in range(rng.integers(3, LONGEST)):
            name.append(rng.choice(VOCAB, p=table[name[-1]]))
        out.append(torch.tensor(name))
    return out


def collate(names):
    return (pad_sequence([n[:-1] for n in names], batch_first=True),
            pad_sequence([n[1:] for n in names], batch_first=True, padding_value=PAD))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, w))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class TownModel(nn.Module):
    def __init__(self, width=30, heads=3, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        angle = torch.arange(LONGEST)[:, None] / 50 ** (torch.arange(width) / width)
        self.places = nn.Parameter(0.3 * torch.sin(angle), requires_grad=False)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, x):
        x = self.embed(x) + self.places[:x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29621").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = towns(320, 1), towns(75, 2)
    sampler = DistributedSampler(train, seed=7)
    loader = DataLoader(train, BATCH // world, sampler=sampler, collate_fn=collate)

    model = TownModel()
    mesh = init_device_mesh("cpu", (world,))
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)                 # gloo knows no premultiplied sum
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=8e-3, betas=(0.9, 0.98), eps=1e-6)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader) - 6, 4e-4)], [6])
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        report = torch.zeros(2)
        for x, y in loader:
            letters = (y != PAD).sum()
            counting = dist.all_reduce(letters, async_op=True)         # of all processes, while the network runs
            logits = model(x)
            total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            counting.wait()
            loss = total / letters
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            report += torch.stack([loss.detach() / len(loader), (y != PAD).sum()])
        value = torch.zeros(2)
        mine = test[rank::world] + test[:1] * (rank >= len(test) % world and len(test) % world > 0)   # equal numbers of passes
        with torch.no_grad():
            x, y = collate(mine)
            if len(test[rank::world]) < len(mine):
                y[-1] = PAD                                            # the filled-in name does not count
            value[0] = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            value[1] = (y != PAD).sum()
        dist.all_reduce(report)
        dist.all_reduce(value)
        if rank == 0:
            print(f"epoch {epoch} loss {report[0]:.4f} letters {int(report[1])} test {value[0] / value[1]:.4f} of {int(value[1])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
