"""One function on N processes from Python: torch.multiprocessing.spawn, and samestep.spawn beside it.

                        torch.multiprocessing.spawn            samestep.spawn
    rank                passed as the first argument           world.rank
    address and port    yours to choose                        chosen, bound and kept
    results             through a queue or a file of yours     returned, in rank order
    an error            of whoever was seen to fail first      of the rank that is to blame, with your line
    in a notebook       functions of cells cannot be started   they can

python examples/spawn.py

Both train the same model on the same made data; the last lines compare the losses.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep

RANKS, STEPS, BATCH = 2, 12, 128


def made():
    """Returns points of 64 numbers, and in which of them each is largest, of the first ten: 12 batches of 128."""
    x = torch.randn(STEPS * BATCH, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, x[:, :10].argmax(1)


def by_torch(rank, folder):
    """Is one rank of torch.multiprocessing.spawn: its number comes first, the meeting point is ours."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 10, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in zip(*(part.split(BATCH) for part in made()), strict=True):
        mine = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()  # the mean of half a batch: their mean is that of the batch
    dist.all_reduce(total)
    Path(folder, f"result{rank}").write_text(repr(total.item() / RANKS), encoding="utf-8")
    dist.destroy_process_group()


def by_samestep():
    """Is one rank of samestep.spawn."""
    with samestep.world(seed=None) as world:
        torch.manual_seed(0)
        model = samestep.replicate(nn.Linear(64, 10, dtype=torch.float64), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = samestep.shards(TensorDataset(*made()), world, batch_size=BATCH, shuffle=False)
        for x, y in batches:
            optimizer.zero_grad()
            batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
        return batches.loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        multiprocessing.spawn(by_torch, args=(meeting,), nprocs=RANKS)
        theirs = [float(Path(meeting, f"result{rank}").read_text(encoding="utf-8")) for rank in range(RANKS)]
    ours = samestep.spawn(by_samestep, RANKS)
    print(f"torch.multiprocessing.spawn  {theirs}")
    print(f"samestep.spawn               {ours}")
    print(f"at most {max(abs(a - b) for a, b in zip(theirs, ours, strict=True)):.1e} apart")
