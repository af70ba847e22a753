"""FSDP2 with an Adafactor of our own on sharded parameters, and a restart from a file half way.

Next-note prediction on made-up tunes with a small gated convolution net.
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

NOTES, LENGTH, WIDTH = 24, 32, 32
BATCH, STEPS, CUT = 32, 30, 17


class Adafactor(torch.optim.Optimizer):
    """Factored second moments; the update is clipped by its own root mean square."""

    def __init__(self, params, lr, decay=0.9, clip=1.0):
        super().__init__(params, dict(lr=lr, decay=decay, clip=clip))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                square = g * g + 1e-30
                state["step"] = state.get("step", 0) + 1
                keep = min(group["decay"], 1 - state["step"] ** -0.8)
                now = {"row": square.mean(1), "col": square.mean(0)} if p.ndim == 2 else {"all": square}
                for k, v in now.items():
                    state[k] = state[k] * keep + v * (1 - keep) if k in state else v
                if p.ndim == 2:
                    second = (state["row"] / state["row"].mean())[:, None] * state["col"][None, :]
                else:
                    second = state["all"]
                update = g / second.sqrt()
                size = (update * update).mean().sqrt()
                update = update / (size / group["clip"]).clamp(min=1.0)
                p.sub_(update * group["lr"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(3 * WIDTH, 2 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        past = [F.pad(h, (0, 0, k, 0))[:, :h.shape[1]] for k in (0, 1, 4)]
        a, b = self.mix(torch.cat(past, -1)).chunk(2, -1)
        return x + self.back(a * torch.sigmoid(b))


class Tunes(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes = nn.Embedding(NOTES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, NOTES)

    def forward(self, x):
        h = self.notes(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def build(seed):
    torch.manual_seed(seed)
    model = Tunes()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, Adafactor(model.parameters(), lr=1e-2)


def save(path, model, opt, step):
    moments = [{k: v.full_tensor() if k != "step" else v for k, v in opt.state[p].items()} for p in model.parameters()]
    state = {"step": step, "opt": moments, "model": [p.detach().full_tensor() for p in model.parameters()]}
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.save(state, path)
    dist.barrier()


@torch.no_grad()
def load(path, model, opt):
    saved = torch.load(path)
    for p, value, moments in zip(model.parameters(), saved["model"], saved["opt"]):
        p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
        opt.state[p]["step"] = moments.pop("step")
        for k, v in moments.items():        # cut like the rows of the parameter; column statistics are whole everywhere
            opt.state[p][k] = distribute_tensor(v, p.device_mesh, [Replicate()] if k == "col" else p.placements)
    return saved["step"]


def tunes(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(NOTES, (n, 1), generator=g)
    moves = torch.tensor([2, 2, 1, 2, 2, 2, 1, 12, 5, 4])[torch.randint(0, 10, (n, 4), generator=g)]
    line = start + moves.repeat(1, LENGTH // 4 + 1).cumsum(1)
    return torch.cat([start, line], 1)[:, :LENGTH + 1] % NOTES


def train(model, opt, data, first, last):
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        g = torch.Generator().manual_seed(10_000 + step)
        rows = torch.randint(len(data), (BATCH,), generator=g)[rank::world]
        x = data[rows]
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 4:
            value = loss.detach() / world
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step + 1} loss {value.item():.4f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = tunes(400, seed=0)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    path = os.path.join(box[0], "tunes.pt")

    model, opt = build(seed=6)
    train(model, opt, data, 0, CUT)
    save(path, model, opt, CUT)
    model, opt = build(seed=77)
    start = load(path, model, opt)
    train(model, opt, data, start, STEPS)
    norm = sum(p.detach().full_tensor().double().square().sum().item() for p in model.parameters()) ** 0.5
    if rank == 0:
        print(f"norm of the weights {norm:.4f}")
        os.remove(path)
        os.rmdir(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
