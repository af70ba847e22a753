"""Switch layer with a capacity: tokens beyond it pass the gate untouched."""
import os, time, math
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist

EXPERTS, DIM = 4, 16
CAPACITY_FACTOR = 1.0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


class TollGates(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, 32) / math.sqrt(DIM))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 32, DIM) / math.sqrt(32))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        hot = F.one_hot(choice, EXPERTS)
        capacity = math.ceil(CAPACITY_FACTOR * len(x) * world() / EXPERTS)
        counts = torch.zeros(world(), EXPERTS, dtype=hot.dtype)
        counts[rank()] = hot.sum(0)
        if world() > 1:
            dist.all_reduce(counts)
        place = ((hot.cumsum(0) + counts[:rank()].sum(0)) * hot).sum(-1)
        kept = place <= capacity
        out = x.clone()
        for e in range(EXPERTS):
            rows = torch.nonzero(kept & (choice == e)).flatten()
            y = F.relu(x[rows] @ self.w1[e]) @ self.w2[e]
            out = out.index_add(0, rows, y * gate[rows, None])
        return out, kept


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.moe = TollGates()
        self.out = nn.Linear(DIM, 5)

    def forward(self, x):
        h, kept = self.moe(torch.tanh(self.inp(x)))
        return self.out(h), kept


def make_data(n=1024, seed=4):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 8, generator=g) * 1.5
    y = torch.randint(0, 5, (n,), generator=g)
    return centres[y] + torch.randn(n, 8, generator=g), y


def average(model):
    if world() == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def train(steps=48, batch=64):
    torch.manual_seed(0)
    model = Model()
    x, y = make_data()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    part = batch // world()
    order = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids = torch.randint(0, len(x), (batch,), generator=order)
        ids = ids[rank() * part:(rank() + 1) * part]
        logits, kept = model(x[ids])
        loss = F.cross_entropy(logits, y[ids])
        opt.zero_grad()
        loss.backward()
        average(model)
        opt.step()
        if step % 12 == 11:
            s = torch.stack([loss.detach(), kept.float().mean()])
            if world() > 1:
                dist.all_reduce(s)
            if rank() == 0:
                print("step %d: loss %.4f, through the gates %.3f" % (step + 1, *(s / world()).tolist()), flush=True)


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    train()
    time.sleep(0.3)
    if dist.is_initialized():
        dist.destroy_process_group()
