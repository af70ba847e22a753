"""DDP on an endless stream: IterableDataset split over ranks and loader workers, bfloat16 autocast,
timings and a short profile on the side, and a time budget that rank 0 decides for all."""
import json
import os
import tempfile
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler keeps quiet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

GLOBAL_BATCH, STEPS, WORKERS, SECONDS = 64, 40, 2, 600.0


class Signals(IterableDataset):
    """Global batch b holds the samples [b*B, (b+1)*B); worker w makes the batches b = w, w+WORKERS, ..., so
    the loader's round robin gives them back in order; the rank takes every world-th sample."""

    def __init__(self, rank, world, batches):
        self.rank, self.world, self.batches = rank, world, batches

    @staticmethod
    def sample(number):
        g = torch.Generator().manual_seed(900_000 + number)
        kind = int(torch.randint(0, 4, (1,), generator=g))
        t = torch.linspace(0, 1, 48)
        freq, phase = 2 + 5 * torch.rand(2, generator=g)
        base = torch.sin(6.28 * (freq * t + phase))
        wave = (base, base.sign() * base.abs().sqrt(), (base * 3).tanh(), base.abs() * 2 - 1)[kind]
        return wave + 0.2 * torch.randn(48, generator=g), kind

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for b in range(first, self.batches, stride):
            rows = [self.sample(b * GLOBAL_BATCH + k) for k in range(self.rank, GLOBAL_BATCH, self.world)]
            yield torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 7, 2, 3), nn.GELU(), nn.Conv1d(16, 24, 5, 2, 2), nn.GELU())
        self.norm = nn.GroupNorm(4, 24)
        self.mid, self.head = nn.Linear(24 * 12, 48), nn.Linear(48, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(self.conv(x[:, None]))
            h = F.gelu(self.mid(h.flatten(1)))
        return self.head(h.float())


class Watch:
    """Step times in a file of the rank; nothing of it reaches the training but the common stop."""

    def __init__(self, folder, rank):
        self.file = open(os.path.join(folder, f"rank{rank}.jsonl"), "w")
        self.start = self.last = time.perf_counter()

    def lap(self, step, loss):
        now = time.perf_counter()
        self.file.write(json.dumps({"step": step, "s": now - self.last, "local_loss": loss}) + "\n")
        self.last = now

    def out_of_time(self, world):
        late = torch.tensor(float(time.perf_counter() - self.start > SECONDS))
        if world > 1:
            dist.broadcast(late, src=0)
        return bool(late)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(14)
    net = Net()
    model = DDP(net, gradient_as_bucket_view=True) if world > 1 else net
    optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Signals(rank, world, STEPS), batch_size=None, num_workers=WORKERS)

    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(folder, rank)
        profiler = None
        for step, (x, y) in enumerate(loader):
            if rank == 0 and step == 20:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profiler.start()
            loss = F.cross_entropy(model(x), y)
            optim.zero_grad()
            loss.backward()
            optim.step()
            if profiler is not None and step == 21:
                profiler.stop()
                with open(os.path.join(folder, "profile.txt"), "w") as f:
                    f.write(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=5))
                profiler = None
            watch.lap(step, loss.item())
            if step % 10 == 9:
                shown = loss.detach().clone()
                if world > 1:
                    dist.all_reduce(shown)
                if rank == 0:
                    print(f"step {step + 1} loss {shown.item() / world:.4f}")
                if watch.out_of_time(world):
                    break
        watch.file.close()

    held = [Signals.sample(10_000_000 + k) for k in range(rank, 250, world)]
    with torch.no_grad():
        logits = net(torch.stack([x for x, _ in held]))
        target = torch.tensor([y for _, y in held])
        res = torch.stack([F.cross_entropy(logits, target, reduction="sum"), (logits.argmax(1) == target).sum().float()])
    if world > 1:
        dist.all_reduce(res)
    if rank == 0:
        print(f"held-out loss {res[0] / 250:.4f} acc {res[1] / 250:.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
