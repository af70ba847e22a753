"""Character model on a small toy grammar: train, stop in the middle of an epoch, continue."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH = 16
WINDOW = 20
STOP_AT = 10
STEPS = 24


def make_corpus():
    g = torch.Generator().manual_seed(21)
    subjects, verbs = ["the cat", "a small dog", "my bird"], ["sees", "hears", "follows"]
    objects, ends = ["a mouse", "the old tree", "some rain", "us"], [". ", "! ", "; "]
    text = ""
    while len(text) < 6000:
        for words, tail in ((subjects, " "), (verbs, " "), (objects, ""), (ends, "")):
            text += words[int(torch.randint(0, len(words), (1,), generator=g))] + tail
    symbols = sorted(set(text))
    ids = torch.tensor([symbols.index(c) for c in text])
    windows = ids[: len(ids) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    return windows[: len(windows) // GLOBAL_BATCH * GLOBAL_BATCH], len(symbols)


class CharModel(nn.Module):
    def __init__(self, symbols):
        super().__init__()
        self.embed = nn.Embedding(symbols, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, symbols)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def stream(windows, rank, world, start=0):
    """Endless batches of this process; start counts the samples that were used before."""
    epoch, offset = divmod(start, len(windows))
    while True:
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
        for lo in range(offset, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            yield windows[order[lo : lo + GLOBAL_BATCH][rank::world]]
        epoch, offset = epoch + 1, 0


def build(symbols):
    torch.manual_seed(0)
    model = DDP(CharModel(symbols))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return model, optimizer, {"step": 0, "samples": 0}


def train(model, optimizer, progress, batches, until, rank, world):
    while progress["step"] < until:
        batch = next(batches)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress["step"] += 1
        progress["samples"] += len(batch)
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0 and progress["step"] % 6 == 0:
            print(f"step {progress['step']} loss {mean.item() / world:.8f}")


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    windows, symbols = make_corpus()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    path = os.path.join(box[0], "last.pt")

    model, optimizer, progress = build(symbols)
    train(model, optimizer, progress, stream(windows, rank, world), STOP_AT, rank, world)
    if rank == 0:
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}, path
        )
    dist.barrier()

    model, optimizer, progress = build(symbols)
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    progress.update(saved["progress"])
    batches = stream(windows, rank, world, start=progress["samples"])
    train(model, optimizer, progress, batches, STEPS, rank, world)

    if rank == 0:
        print(f"weight norm {sum(p.detach().square().sum() for p in model.parameters()).item():.8f}")
    dist.barrier()
    if rank == 0:
        os.remove(path)
        os.rmdir(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
