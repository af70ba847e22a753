"""Tensor-parallel bigram-context model: embedding and output layer cut along the vocabulary, MLP column/row, loss on sharded logits."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)
from torch.utils.data import DataLoader, TensorDataset

VOCAB, CTX = 48, 8


class FeedForward(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(d, 4 * d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.ff = FeedForward(d)

    def forward(self, x):
        return x + self.ff(self.norm(x))


class LM(nn.Module):
    def __init__(self, d=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList(Mixer(d) for _ in range(depth))
        self.final = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, VOCAB, bias=False)

    def forward(self, tok):
        h = self.embed(tok)
        for layer in self.layers:
            h = layer(h)
        return self.lm_head(self.final(h))


def parallelize(model, mesh):
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "final": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })
    for layer in model.layers:
        parallelize_module(layer, mesh, {
            "norm": SequenceParallel(),
            "ff": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ff.w1": ColwiseParallel(),
            "ff.w3": ColwiseParallel(),
            "ff.w2": RowwiseParallel(output_layouts=Shard(1)),
        })
    return model


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = torch.zeros(n, CTX + 1, dtype=torch.long)
    rows[:, 0] = torch.randint(VOCAB, (n,), generator=g)
    for t in range(CTX):
        jump = torch.randint(1, 4, (n,), generator=g)
        rows[:, t + 1] = (rows[:, t] * 5 + jump) % VOCAB
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=32, help="the whole batch: all processes work on the same rows")
    ap.add_argument("--epochs", type=int, default=2)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    torch.manual_seed(5)
    model = parallelize(LM(), mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
    loader = DataLoader(corpus(512, 1), batch_size=a.batch_size, shuffle=True, generator=torch.Generator().manual_seed(9))
    vx, vy = corpus(200, 2).tensors

    for epoch in range(a.epochs):
        for x, y in loader:
            with loss_parallel():
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            guess = model(vx).full_tensor().argmax(-1)
        total, shown = total.full_tensor(), loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {shown.item():.4f} grad norm {total.item():.3f} next-token acc {(guess == vy).float().mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
