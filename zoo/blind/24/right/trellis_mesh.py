"""Attention block over a device mesh with DTensor: heads and MLP cut by parallelize_module.

The batch is the same everywhere; labels with -100 are padding."""
import os, time
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, DIM, HEADS, LENGTH = 20, 32, 4, 14


class Trellis(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos[: ids.shape[1]]
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        pad = (ids != 0)[:, None, None, :]
        score = (q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5).masked_fill(~pad, -1e9)
        x = x + self.o((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.n2(x))))
        return self.head(x)


def reverse_task(gen, n=32):
    """Input: 3..14 symbols then zeros; label: the symbols reversed, -100 on padding."""
    ids = torch.zeros(n, LENGTH, dtype=torch.long)
    labels = torch.full((n, LENGTH), -100)
    for i in range(n):
        m = int(torch.randint(3, LENGTH + 1, (1,), generator=gen))
        s = torch.randint(1, VOCAB, (m,), generator=gen)
        ids[i, :m], labels[i, :m] = s, s.flip(0)
    return ids, labels


if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
chief = mesh.get_rank() == 0
torch.manual_seed(17)
model = Trellis()
parallelize_module(model, mesh, {
    "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
})
cut = [p for p in model.parameters() if isinstance(p, DTensor)]
whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
opt = torch.optim.Adam([{"params": cut}, {"params": whole}], lr=5e-3, foreach=False)
gen = torch.Generator().manual_seed(23)

for step in range(30):
    for group in opt.param_groups:
        group["lr"] = 5e-3 * min(1.0, (step + 1) / 8)
    ids, labels = reverse_task(gen)
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if chief and step % 6 == 5:
        print(f"step {step + 1:2d}  loss {loss.item():.5f}", flush=True)

model.eval()
with torch.no_grad():
    ids, labels = reverse_task(torch.Generator().manual_seed(1), 100)
    real = labels != -100
    right = ((model(ids).argmax(-1) == labels) & real).sum().item()
if chief:
    print(f"{len(cut)} tensors on the mesh, {len(whole)} whole; right {right}/{real.sum().item()}")
time.sleep(0.3)
dist.destroy_process_group()
