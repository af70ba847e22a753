import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

# House prices by postcode: a big sparse table (SparseAdam) and a small dense head (SGD).
# A sale lists between one and four postcodes (its own and near ones): bags of uneven size.
CODES, SALES, BATCH, STEPS = 3000, 1600, 90, 32

rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
diary = open(os.path.join(tempfile.mkdtemp(prefix="postcodes_"), f"rank{rank}.log"), "w")

rng = np.random.default_rng(77)
value = rng.normal(size=CODES)
zipf = 1 / np.arange(1, CODES + 1) ** 0.9
zipf /= zipf.sum()
bags = [rng.choice(CODES, rng.integers(1, 5), replace=False, p=zipf) for _ in range(SALES)]
extra = torch.tensor(rng.normal(size=(SALES, 5)), dtype=torch.float32)
price = torch.tensor([value[b].mean() for b in bags], dtype=torch.float32) + 0.3 * extra[:, 0]


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(CODES, 8, mode="mean", sparse=True)
        self.head = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, rows):
        flat = torch.from_numpy(np.concatenate([bags[r] for r in rows]))
        starts = torch.from_numpy(np.cumsum([0] + [len(bags[r]) for r in rows[:-1]]))
        return self.head(torch.cat([self.table(flat, starts), extra[rows]], 1))[:, 0]


def merge_sparse(grad):
    """Sum of everybody's sparse gradients: counts, then indices and values padded to the longest."""
    grad = grad.coalesce()
    if world == 1:
        return grad
    n = torch.tensor([grad._nnz()])
    counts = [torch.zeros_like(n) for _ in range(world)]
    dist.all_gather(counts, n)
    longest = int(max(counts))
    index = torch.zeros(longest, dtype=torch.long)
    vals = torch.zeros(longest, grad.shape[1])
    index[:n], vals[:n] = grad.indices()[0], grad.values()
    all_index = [torch.empty_like(index) for _ in range(world)]
    all_vals = [torch.empty_like(vals) for _ in range(world)]
    dist.all_gather(all_index, index)
    dist.all_gather(all_vals, vals)
    # leave the padding out: a zero row at code 0 would still move SparseAdam's moments there
    index = torch.cat([t[:c] for t, c in zip(all_index, counts)])
    vals = torch.cat([t[:c] for t, c in zip(all_vals, counts)])
    return torch.sparse_coo_tensor(index[None], vals, grad.shape, check_invariants=False).coalesce()


torch.manual_seed(15)
model = Prices()
sparse_opt = torch.optim.SparseAdam(model.table.parameters(), lr=0.02)
dense_opt = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9, nesterov=True)
touched = set()
for step in range(STEPS):
    batch = rng.choice(1300, BATCH, replace=False)
    rows = np.array_split(batch, world)[rank]                   # 23, 23, 22, 22
    loss = nn.functional.smooth_l1_loss(model(rows), price[rows], reduction="sum") / BATCH
    model.zero_grad(set_to_none=True)
    loss.backward()
    model.table.weight.grad = merge_sparse(model.table.weight.grad)
    whole = loss.detach().clone()
    if world > 1:
        for p in model.head.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(whole)
    sparse_opt.step()
    dense_opt.step()
    touched.update(model.table.weight.grad.indices()[0].tolist())
    print(step, len(rows), loss.item(), file=diary)             # my share only, for debugging
    if rank == 0 and step % 8 == 7:
        print(f"step {step + 1} loss {whole.item():.5f}, {len(touched)} postcodes touched", flush=True)
diary.close()

model.eval()
with torch.no_grad():
    rows = np.arange(1300 + rank, SALES, world)
    mae = (model(rows) - price[rows]).abs().double().sum()
    if world > 1:
        dist.reduce(mae, dst=0)
if rank == 0:
    print(f"held-out mean absolute error {mae.item() / 300:.5f}")
time.sleep(0.3)
if world > 1:
    dist.destroy_process_group()
