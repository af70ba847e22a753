"""Wine cultivars with an MLP. Gradients are exchanged pairwise over a hypercube: no all-reduce in this cluster's library."""
import os, time
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_wine

rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))
if world & (world - 1):
    raise SystemExit("needs a power of two")
if world > 1:
    dist.init_process_group("gloo")


class Hypercube:
    """Sums one flat vector over all nodes with log2(world) swaps between neighbours."""

    def __init__(self, params):
        self.params = list(params)
        self.hops = [1 << k for k in range(world.bit_length() - 1)]
        self.calls = 0

    def swap(self, tensor, partner):
        other = torch.empty_like(tensor)
        ops = [dist.P2POp(dist.isend, tensor, partner), dist.P2POp(dist.irecv, other, partner)]
        for w in dist.batch_isend_irecv(ops):
            w.wait()
        return other

    def __call__(self, *extra):
        flat = torch.cat([p.grad.reshape(-1) for p in self.params] + [e.reshape(1) for e in extra])
        # start with another dimension each time, so that no cable is always the last one
        turn = self.calls % max(1, len(self.hops))
        self.calls += 1
        for hop in self.hops[turn:] + self.hops[:turn]:
            mine = flat
            theirs = self.swap(mine.contiguous(), rank ^ hop)
            flat = mine + theirs
        at = 0
        for p in self.params:
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
        return flat[at:].tolist()


wine = load_wine()
x = torch.tensor(wine.data, dtype=torch.float32)
y = torch.tensor(wine.target)
shuffle = torch.randperm(len(x), generator=torch.Generator().manual_seed(8))
x, y = x[shuffle], y[shuffle]
tx, ty, vx, vy = x[:128], y[:128], x[128:], y[128:]
mean, std = tx.mean(0), tx.std(0)
tx, vx = (tx - mean) / std, (vx - mean) / std

torch.manual_seed(21)
net = nn.Sequential(nn.Linear(13, 24), nn.ELU(), nn.LayerNorm(24), nn.Linear(24, 16), nn.ELU(), nn.Linear(16, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9, nesterov=True, weight_decay=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 48)
exchange = Hypercube(net.parameters())
BATCH = 32

step = 0
for epoch in range(12):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1000 + epoch))
    for lo in range(0, 128, BATCH):
        block = order[lo:lo + BATCH]
        # Gray code of the rank: neighbours in the cube hold neighbouring rows
        part = block.chunk(world)[rank ^ (rank >> 1)]
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(tx[part]), ty[part], reduction="sum") / BATCH
        loss.backward()
        (whole,) = exchange(loss.detach())
        opt.step()
        sched.step()
        step += 1
    if rank == 0 and epoch % 3 == 2:
        print(f"epoch {epoch + 1:2d} step {step} loss {whole:.6f}", flush=True)

with torch.no_grad():
    accuracy = (net(vx).argmax(1) == vy).float().mean().item()
if rank == 0:
    norm = sum(p.square().sum() for p in net.parameters()).sqrt().item()
    print(f"held-out accuracy {accuracy:.4f}   weight norm {norm:.6f}")
if world > 1:
    time.sleep(0.3)
    dist.destroy_process_group()
