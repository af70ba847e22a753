"""Tensor-parallel language model with DTensor: embedding, feed-forward and the loss are cut over the vocabulary
or the hidden size; each rank reads the same sentences."""
import argparse
import inspect
import time
import calendar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.gate = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LM(nn.Module):
    def __init__(self, vocab, dim=32, context=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.squeeze = nn.Linear(dim * context, dim)
        self.norm = nn.LayerNorm(dim)
        self.ff = FeedForward(dim, 64)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = torch.tanh(self.squeeze(self.emb(ids).flatten(1)))
        return self.head(h + self.ff(self.norm(h)))


PLAN = {
    "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "ff.up": ColwiseParallel(),
    "ff.gate": ColwiseParallel(),
    "ff.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--context", type=int, default=6)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    text = inspect.getsource(calendar)
    chars = sorted(set(text))
    vocab = (len(chars) + 7) // 8 * 8
    ids = torch.tensor([chars.index(c) for c in text])
    torch.manual_seed(81)
    model = LM(vocab, context=args.context)
    model = parallelize_module(model, mesh, PLAN)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, foreach=False)
    g = torch.Generator().manual_seed(6)
    for step in range(args.steps):
        at = torch.randint(args.context, len(ids), (args.batch,), generator=g)
        x = torch.stack([ids[a - args.context:a] for a in at])
        opt.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(x), ids[at])
            loss.backward()
        opt.step()
        value = loss.full_tensor().item()
        if dist.get_rank() == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {value:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
