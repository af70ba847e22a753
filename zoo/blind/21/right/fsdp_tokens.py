"""Sequence tagger under fully_shard: accumulation, loss per labelled token, a restart from a checkpoint."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, TAGS, LEN, MICRO, ACCUM, STEPS, CUT = 32, 6, 14, 8, 3, 9, 4


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Tagger(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.pos = nn.Parameter(torch.randn(LEN, d) * 0.1)
        self.layers = nn.ModuleList(Layer(d) for _ in range(2))
        self.out = nn.Linear(d, TAGS)

    def forward(self, ids):
        h = self.emb(ids) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.out(h.flatten(0, 1))


def corpus(n=130):
    g = torch.Generator().manual_seed(6)
    ids = torch.randint(0, VOCAB, (n, LEN), generator=g)
    tags = (ids + ids.roll(1, 1)) % TAGS
    hidden = torch.rand(n, LEN, generator=g) > torch.rand(n, 1, generator=g).clamp(min=0.15)
    return ids, tags.masked_fill(hidden, -100)


class Feed:
    """Keeps its own position, so that it can be stored with the weights."""

    def __init__(self, n):
        self.n, self.epoch, self.at = n, 0, 0

    def window(self):
        if self.at + MICRO * ACCUM > self.n:
            self.epoch, self.at = self.epoch + 1, 0
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(50 + self.epoch))
        picked = order[self.at:self.at + MICRO * ACCUM]
        self.at += MICRO * ACCUM
        return picked.split(MICRO)


def build(mesh, seed):
    torch.manual_seed(seed)
    net = Tagger()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=4e-3, eps=1e-6)


def train(net, opt, feed, data, steps, first, rank, world):
    ids, tags = data
    for step in range(first, first + steps):
        parts = [p[rank::world] for p in feed.window()]
        labelled = torch.stack([(tags[p] != -100).sum() for p in parts]).sum()
        dist.all_reduce(labelled)
        shown = torch.zeros(())
        for i, p in enumerate(parts):
            net.set_requires_gradient_sync(i == len(parts) - 1)
            nll = F.cross_entropy(net(ids[p]), tags[p].flatten(), reduction="sum")
            (nll * world / labelled).backward()
            shown += nll.detach() / labelled
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.55)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        opt.step()
        opt.zero_grad()
        dist.all_reduce(shown)
        if rank == 0 and step % 2 == 0:
            print(f"step {step} labelled {int(labelled)} loss {shown:.5f} norm {norm:.4f}")


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    data = corpus()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)

    net, opt = build(mesh, seed=1)
    feed = Feed(len(data[0]))
    train(net, opt, feed, data, CUT, 0, rank, world)
    model_state, opt_state = get_state_dict(net, opt)
    dcp.save({"model": model_state, "opt": opt_state, "epoch": torch.tensor(feed.epoch),
              "at": torch.tensor(feed.at)}, checkpoint_id=folder[0])

    net, opt = build(mesh, seed=2)
    feed = Feed(len(data[0]))
    model_state, opt_state = get_state_dict(net, opt)
    state = {"model": model_state, "opt": opt_state, "epoch": torch.tensor(0), "at": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(net, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    feed.epoch, feed.at = int(state["epoch"]), int(state["at"])
    train(net, opt, feed, data, STEPS - CUT, CUT, rank, world)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
