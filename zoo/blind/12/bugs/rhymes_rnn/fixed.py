# A character GRU on a nursery rhyme; gradients are averaged by hand after each backward pass.
import os, time
import torch
import torch.distributed as dist
import torch.nn as nn

TEXT = """the house that jack built. this is the malt that lay in the house that jack built.
this is the rat that ate the malt that lay in the house that jack built. this is the cat that
killed the rat that ate the malt that lay in the house that jack built. this is the dog that
worried the cat that killed the rat that ate the malt that lay in the house that jack built.
""" * 3
CHARS = sorted(set(TEXT))
IDS = torch.tensor([CHARS.index(c) for c in TEXT])
LENGTH, BATCH, STEPS, MAX_NORM = 24, 16, 40, 0.25

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)


class CharModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.emb = nn.Embedding(len(CHARS), 12)
        self.gru = nn.GRU(12, hidden, batch_first=True)
        self.out = nn.Linear(hidden, len(CHARS))

    def forward(self, x):
        return self.out(self.gru(self.emb(x))[0])


def average_gradients(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= WORLD
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


torch.manual_seed(17)
model = CharModel()
for p in model.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
picker = torch.Generator().manual_seed(23)
offsets = torch.arange(LENGTH + 1)

for step in range(STEPS):
    starts = torch.randint(0, len(IDS) - LENGTH - 1, (BATCH,), generator=picker)
    window = IDS[starts[RANK::WORLD, None] + offsets]
    logits = model(window[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    if step % 10 == 9:
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if RANK == 0:
            print(step + 1, f"{shown.item() / WORLD:.6f}")

time.sleep(0.3)
dist.destroy_process_group()
