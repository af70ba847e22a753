"""HSDP: shards inside a pair, copies between pairs. Small language model, loss per real token.

Between the micro-batches of a window gradients are only scattered inside the pair; copies meet at the last one.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, LONGEST = 40, 32, 20
BATCH, MICROS, STEPS = 16, 3, 24


def sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(1, VOCAB, (VOCAB, 3), generator=torch.Generator().manual_seed(0))
    out = torch.zeros(n, LONGEST + 1, dtype=torch.long)
    lengths = torch.randint(4, LONGEST + 1, (n,), generator=g)
    now = torch.randint(1, VOCAB, (n,), generator=g)
    for t in range(LONGEST + 1):
        out[:, t] = now
        now = table[now, torch.randint(3, (n,), generator=g).clamp(max=1)]
    out[torch.arange(LONGEST + 1)[None] > lengths[:, None]] = 0
    return out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.a(x)
        q = self.q(h).view(b, t, 4, 8).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, 2, 8).permute(2, 0, 3, 1, 4).repeat_interleave(2, dim=2)   # grouped heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.silu(self.up(self.b(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        h = self.tokens(x) + self.places.weight[:x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    inner = min(2, world)
    mesh = init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("copies", "pair"))
    torch.manual_seed(40)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.97))
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.2, total_iters=5)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS - 5, eta_min=5e-4)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cool], milestones=[5])
    data = sentences(600, seed=3)
    draw = torch.Generator().manual_seed(12)

    for step in range(STEPS):
        window = torch.randint(len(data), (MICROS, BATCH), generator=draw)
        tokens = (data[window.flatten()][:, 1:] != 0).sum()
        total = torch.zeros(())
        for k, rows in enumerate(window):
            model.set_requires_all_reduce(k == MICROS - 1)
            mine = data[rows.chunk(world)[rank]]
            logits = model(mine[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), ignore_index=0, reduction="sum") / tokens
            (loss * world).backward()          # gradients are averaged over all processes
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        opt.zero_grad()
        sched.step()
        if step % 6 == 5:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total.item():.4f} norm {norm.item():.4f} tokens {tokens.item()}")

    test = sentences(62, seed=4)
    rows = torch.arange(rank, len(test), world)
    steps = -(-len(test) // world)
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for k in range(steps):              # every process has to come along in each forward
            i = rows[k:k + 1] if k < len(rows) else rows[-1:]
            logits = model(test[i][:, :-1])
            if k < len(rows):
                target = test[i][:, 1:].flatten()
                sums[0] += F.cross_entropy(logits.flatten(0, 1), target, ignore_index=0, reduction="sum")
                sums[1] += (target != 0).sum()
    dist.all_reduce(sums)
    if rank == 0:
        print(f"test loss {sums[0] / sums[1]:.4f} over {int(sums[1])} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
