"""Character transformer with tensor parallelism (DTensor): heads and hidden units are divided over the processes."""
import argparse
import inspect
import json.decoder
import json.encoder
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class HeadNorm(nn.Module):
    """RMS norm over one head's channels; the gain is shared by all heads."""

    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        gain = self.gain
        if isinstance(gain, DTensor):
            gain = gain.to_local(grad_placements=[Partial()])
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = HeadNorm(self.head_dim), HeadNorm(self.head_dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self, vocab, context, width=32, heads=4, depth=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


PLAN = {"attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--context", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    text = inspect.getsource(json.decoder) + inspect.getsource(json.encoder)
    letters = {ch: i for i, ch in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[ch] for ch in text])

    torch.manual_seed(13)
    model = Model(len(letters), args.context)
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)
        for norm in (layer.attention.q_norm, layer.attention.k_norm):
            distribute_module(norm, mesh)

    split = [[p for p in model.parameters() if isinstance(p, DTensor) == flag] for flag in (True, False)]
    opts = [torch.optim.Adam(group, lr=args.lr) for group in split]
    g = torch.Generator().manual_seed(17)
    for step in range(args.steps):
        at = torch.randint(0, len(data) - args.context - 1, (args.batch, 1), generator=g) + torch.arange(args.context + 1)
        window = data[at]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
