"""FSDP2 transformer classifier; the job is cut in the middle of an epoch and goes on from its checkpoint."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, CUT, LR = 32, 21, 3e-3


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Classifier(nn.Module):
    def __init__(self, vocab=16, dim=32, length=12, classes=4):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Batches:
    """Deterministic order with a position (epoch, step) that goes into the checkpoint."""

    def __init__(self, n, batch, rank, world):
        self.n, self.batch, self.rank, self.world = n, batch, rank, world
        self.epoch = self.step = 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(77 + self.epoch))
        while self.step < self.n // self.batch:
            ids = order[self.step * self.batch:(self.step + 1) * self.batch]
            self.step += 1
            yield ids[self.rank::self.world]
        self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        self.epoch, self.step = state["epoch"], state["step"]


def build(mesh, lr):
    torch.manual_seed(0)
    model = Classifier()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optim, torch.optim.lr_scheduler.CosineAnnealingLR(optim, STEPS)


def snapshot(model, optim, sched, batches):
    weights, moments = get_state_dict(model, optim)
    return {"model": weights, "optim": moments, "sched": sched.state_dict(), "data": batches.state_dict()}


def load(path, model, optim, sched, batches):
    state = snapshot(model, optim, sched, batches)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    sched.load_state_dict(state["sched"])
    batches.load_state_dict(state["data"])


def run(model, optim, sched, batches, data, until):
    x, y = data
    done = batches.epoch * (batches.n // batches.batch) + batches.step
    while done < until:
        for ids in batches:
            loss = F.cross_entropy(model(x[ids]), y[ids])
            optim.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            sched.step()
            done += 1
            if done == until:
                break


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    g = torch.Generator().manual_seed(9)
    x = torch.randint(0, 16, (640, 12), generator=g)
    y = (x[:, :6].sum(1) > x[:, 6:].sum(1)).long() + 2 * (x[:, 0] % 2)
    train, (vx, vy) = (x[:512], y[:512]), (x[512:], y[512:])

    temp = tempfile.TemporaryDirectory()
    folder = [temp.name]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "ckpt")

    first = (*build(mesh, LR), Batches(512, 32, rank, world))
    run(*first, train, CUT)
    dcp.save(snapshot(*first), checkpoint_id=path)
    del first

    job = (*build(mesh, LR), Batches(512, 32, rank, world))
    load(path, *job)
    run(*job, train, STEPS)

    model = job[0]
    size = sum(p.detach().full_tensor().abs().sum() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(vx[rank::world])
        stats = torch.stack([F.cross_entropy(logits, vy[rank::world], reduction="sum"),
                             (logits.argmax(1) == vy[rank::world]).sum().double()])
    dist.all_reduce(stats)
    if rank == 0:
        print(f"valid loss {stats[0] / 128:.10f} acc {stats[1] / 128:.6f} |w| {size:.8f}")
    temp.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
