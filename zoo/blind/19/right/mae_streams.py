"""Masked autoencoder with DDP.

Random streams, by design: weights and data order come from common seeds and are the same for any number of
processes; masks and dropout come from one stream per rank (SEED + 1000 + rank), so the drawn noise depends on
the number of processes.  A checkpoint holds every rank's own stream, and a rank resumes with its own.
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SEED, BATCH, EPOCHS, CUT, MASKED = 2026, 64, 4, 37, 10


class MAE(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.read, self.pos = nn.Linear(4, dim), nn.Parameter(0.1 * torch.randn(16, dim))
        self.blank = nn.Parameter(torch.zeros(dim))
        layer = dict(d_model=dim, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
        self.write = nn.Linear(dim, 4)

    def encode(self, patches, hidden=None):
        x = self.read(patches)
        if hidden is not None:
            x = torch.where(hidden[..., None], self.blank, x)
        x = x + self.pos
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, patches, hidden):
        out = self.write(self.encode(patches, hidden))
        return F.mse_loss(out[hidden], patches[hidden])  # the same number of hidden patches in every sample


def patchify(img):
    return img.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)


def draw_mask(n):
    hidden = torch.zeros(n, 16, dtype=torch.bool)
    return hidden.scatter(1, torch.rand(n, 16).argsort(1)[:, :MASKED], True)


class Job:
    def __init__(self, rank, world, data):
        self.rank, self.world, self.data = rank, world, data
        torch.manual_seed(SEED)
        self.net = MAE()
        self.model = DDP(self.net) if world > 1 else self.net
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.02)
        self.per_epoch = len(data) // BATCH
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, EPOCHS * self.per_epoch)
        self.step = 0
        torch.manual_seed(SEED + 1000 + rank)  # from here on the rank's own stream

    def ids(self, step):
        epoch, at = divmod(step, self.per_epoch)
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(SEED + epoch))
        return order[at * BATCH:(at + 1) * BATCH].chunk(self.world)[self.rank]

    def run(self, until):
        self.model.train()
        while self.step < until:
            x = self.data[self.ids(self.step)]
            loss = self.model(x, draw_mask(len(x)))
            self.optim.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optim.step()
            self.sched.step()
            self.step += 1

    def save(self, path):
        streams = [torch.get_rng_state()]
        if self.world > 1:
            gathered = [None] * self.world
            dist.all_gather_object(gathered, streams[0])
            streams = gathered
        if self.rank == 0:
            torch.save({"net": self.net.state_dict(), "optim": self.optim.state_dict(), "sched": self.sched.state_dict(),
                        "step": self.step, "streams": streams}, path)
        if self.world > 1:
            dist.barrier()

    def load(self, path):
        state = torch.load(path)
        self.net.load_state_dict(state["net"])
        self.optim.load_state_dict(state["optim"])
        self.sched.load_state_dict(state["sched"])
        self.step = state["step"]
        torch.set_rng_state(state["streams"][self.rank])


def evaluate(net, test, rank, world):
    """Reconstruction with a fixed checkerboard mask, no dropout."""
    net.eval()
    board = (torch.arange(16) + torch.arange(16) // 4) % 2 == 0
    part = test.tensor_split(world)[rank]
    with torch.no_grad():
        err = net.write(net.encode(part, board.expand(len(part), 16)))[:, board] - part[:, board]
    total = err.square().sum()
    if world > 1:
        dist.all_reduce(total)
    return total.item() / (len(test) * int(board.sum()) * 4)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    patches = patchify(torch.tensor(load_digits().images) / 16)
    train, test = patches[:1408], patches[1408:]
    with tempfile.TemporaryDirectory() as folder:
        place = [os.path.join(folder, "mae.pt")]
        if world > 1:
            dist.broadcast_object_list(place, src=0)
        first = Job(rank, world, train)
        first.run(CUT)
        before = evaluate(first.net, test, rank, world)
        first.save(place[0])
        job = Job(rank, world, train)
        job.load(place[0])
        if world > 1:
            dist.barrier()  # nobody removes the folder while others read
    job.run(EPOCHS * job.per_epoch)
    after = evaluate(job.net, test, rank, world)
    if rank == 0:
        print(f"step {CUT} mse {before:.10f}\nstep {job.step} mse {after:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
