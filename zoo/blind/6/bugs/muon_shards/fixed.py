"""Character model on the source text of the standard library, FSDP2, orthogonalised momentum."""
import argparse
import inspect
import json
import textwrap
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    if flip:
        x = x.T
    return x * max(1.0, g.shape[0] / g.shape[1]) ** 0.5


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"].mul_(group["momentum"]).add_(p.grad)
                update = distribute_tensor(newton_schulz(m.full_tensor()), p.device_mesh, p.placements).to_local()
                p.to_local().add_(update, alpha=-group["lr"])


class CharMLP(nn.Module):
    def __init__(self, vocab, context, width):
        super().__init__()
        self.emb = nn.Embedding(vocab, 24)
        self.fc1 = nn.Linear(24 * context, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, vocab)

    def forward(self, x):
        h = self.emb(x).flatten(1)
        h = F.gelu(self.fc1(h))
        h = h + F.gelu(self.fc2(h))
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64, help="samples per step over all ranks")
    ap.add_argument("--context", type=int, default=8)
    ap.add_argument("--width", type=int, default=64)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    text = inspect.getsource(json) + inspect.getsource(textwrap)
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])

    torch.manual_seed(1)
    model = CharMLP(len(chars), args.context, args.width)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model.fc1, model.fc2):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [model.fc1.weight, model.fc2.weight]
    others = [p for n, p in model.named_parameters() if not n.startswith("fc")]
    opts = [Muon(matrices), torch.optim.AdamW(others, lr=3e-3)]

    draw = torch.Generator().manual_seed(7)
    for step in range(args.steps):
        start = torch.randint(0, len(data) - args.context - 1, (args.batch,), generator=draw)[rank::world]
        x = torch.stack([data[s:s + args.context] for s in start])
        y = data[start + args.context]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if step % 10 == 9:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
