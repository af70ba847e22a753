"""Route support tickets that arrive as a stream, read by loader workers."""
import os
import random
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

QUEUES = {
    "billing": ["invoice", "refund", "card", "charge", "price", "receipt"],
    "access": ["login", "password", "locked", "token", "account", "reset"],
    "network": ["slow", "timeout", "vpn", "cable", "router", "packet"],
    "other": ["hello", "thanks", "question", "office", "lunch", "parking"],
}
COMMON = ["please", "the", "my", "since", "today", "again", "help", "with", "and", "cannot"]
BUCKETS, TICKETS, BATCH, WORKERS = 128, 512, 32, 2


def ticket(number):
    r = random.Random(f"ticket-{number}")
    queue = r.randrange(len(QUEUES))
    words = list(QUEUES.values())[queue]
    text = [r.choice(words) if r.random() < 0.3 else r.choice(COMMON) for _ in range(10)]
    return " ".join(text), queue


class TicketStream(IterableDataset):
    def __init__(self, tickets, rank, world):
        self.tickets, self.rank, self.world = tickets, rank, world

    def __iter__(self):
        info = get_worker_info()
        shards = self.world * info.num_workers
        shard = self.rank * info.num_workers + info.id
        for number in range(shard, self.tickets, shards):
            yield ticket(number)


def collate(rows):
    ids = torch.tensor([[zlib.crc32(w.encode()) % BUCKETS for w in text.split()] for text, _ in rows])
    return ids, torch.tensor([queue for _, queue in rows])


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, 16, mode="mean")
        self.top = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, len(QUEUES)))

    def forward(self, ids):
        return self.top(self.bag(ids))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    model = DDP(Router())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(
        TicketStream(TICKETS, rank, world), batch_size=BATCH // world, num_workers=WORKERS, collate_fn=collate
    )
    sums = torch.zeros(2)
    for step, (ids, queue) in enumerate(loader):
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits, queue)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums += torch.tensor([loss.item(), (logits.argmax(1) == queue).double().mean().item()])
        if step % 4 == 3:
            shown = sums / (4 * world)
            dist.all_reduce(shown)
            sums.zero_()
            if rank == 0:
                print(f"step {step + 1:2d} loss {shown[0].item():.8f} accuracy {shown[1].item():.4f}")
    if rank == 0:
        print(f"bag norm {model.module.bag.weight.norm().item():.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
