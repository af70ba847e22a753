"""Language model blocks with tensor parallelism inside the MLP and sequence
parallelism outside of it (norms, residual stream and head see a slice of the sequence)."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
TP_RANK = int(os.environ.get("RANK", 0))
TP = int(os.environ.get("WORLD_SIZE", 1))
SEQ, BATCH, DIM, HIDDEN, VOCAB = 16, 8, 24, 64, 16


def all_gather_seq(x):
    if TP == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(TP)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 0)


def reduce_scatter_seq(x):
    if TP == 1:
        return x
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x.chunk(TP, 0)[TP_RANK].clone()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather_seq(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_seq(grad)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter_seq(x)

    @staticmethod
    def backward(ctx, grad):
        return all_gather_seq(grad)


class ParallelMLP(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.up_weight = nn.Parameter(up.weight.detach().chunk(TP, 0)[TP_RANK].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(TP, 0)[TP_RANK].clone())
        self.down_weight = nn.Parameter(down.weight.detach().chunk(TP, 1)[TP_RANK].clone())
        self.out_bias = nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        h = F.gelu(F.linear(Gather.apply(x), self.up_weight, self.up_bias))
        return Scatter.apply(F.linear(h, self.down_weight)) + self.out_bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mlp = ParallelMLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB * 2, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, pairs):
        x = self.embed(pairs).sum(-2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequence_parallel_params(model):
    """Parameters that each process applied to its own slice of the sequence only."""
    whole = ("embed", "head")
    return [p for name, p in model.named_parameters()
            if name.startswith(whole) or "norm." in name or name.endswith("out_bias")]


def batch(gen):
    tokens = torch.randint(0, VOCAB, (SEQ + 2, BATCH), generator=gen)
    target = (tokens[:-2] * 3 + tokens[1:-1] + (torch.rand(SEQ, BATCH, generator=gen) < 0.1)) % VOCAB
    pairs = torch.stack([tokens[:-2], tokens[1:-1] + VOCAB], -1)
    return pairs.chunk(TP, 0)[TP_RANK], target.long().chunk(TP, 0)[TP_RANK]


def main():
    if TP > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(13)
    model = Model()
    shared = sequence_parallel_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    gen = torch.Generator().manual_seed(1)
    for step in range(40):
        pairs, target = batch(gen)
        loss = F.cross_entropy(model(pairs).flatten(0, 1), target.flatten(), reduction="sum")
        loss = loss / (SEQ * BATCH)
        optimizer.zero_grad()
        loss.backward()
        if TP > 1:
            for p in shared:
                dist.all_reduce(p.grad)
        optimizer.step()
        value = loss.detach().clone()
        if TP > 1:
            dist.all_reduce(value)
        if TP_RANK == 0 and step % 10 == 9:
            print(f"{step + 1:3d} {value.item():.10f} norm {model.norm.weight.sum().item():.10f}")
    if TP > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
