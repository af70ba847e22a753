import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, LAYERS, SEQ = 24, 32, 4, 12
BATCH, MICRO, STEPS, CLIP = 32, 4, 40, 0.7

rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
first, last = rank == 0, rank == world - 1
if world > 1:
    dist.init_process_group("gloo")
    ends = dist.new_group([0, world - 1])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.out(self.rnn(self.norm(x))[0])


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        table = nn.Embedding(VOCAB, DIM)
        layers = [Layer() for _ in range(LAYERS)]
        per = LAYERS // world
        self.layers = nn.ModuleList(layers[rank * per:(rank + 1) * per])
        if first or last:
            self.table = table
        if last:
            self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        if first:
            x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.table.weight) / DIM ** 0.5 if last else x


def receive(shape, source):
    buffer = torch.empty(shape)
    dist.recv(buffer, source)
    return buffer


def sequences(seed, n):
    g = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, VOCAB, (n, 1), generator=g), torch.randint(1, 5, (n, 1), generator=g)
    wobble = (torch.rand(n, SEQ + 1, generator=g) < 0.05).long()
    return (start + step * torch.arange(SEQ + 1) + wobble) % VOCAB


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def forward_backward(stage, ids):
    inputs, outputs, total = [], [], torch.zeros(())
    for chunk in ids.chunk(MICRO):
        x = chunk[:, :-1] if first else receive((len(chunk), SEQ, DIM), rank - 1).requires_grad_()
        y = stage(x)
        if last:
            y = loss_of(y, chunk[:, 1:]) / MICRO
            total += y.detach()
        else:
            dist.send(y.detach(), rank + 1)
        inputs.append(x)
        outputs.append(y)
    for x, y in zip(inputs, outputs):
        if last:
            y.backward()
        else:
            y.backward(receive(y.shape, rank + 1))
        if not first:
            dist.send(x.grad, rank - 1)
    return total


def owned(stage):
    for name, p in stage.named_parameters():
        if not (name == "table.weight" and last and not first):
            yield p


def clip(stage):
    square = sum(p.grad.square().sum() for p in owned(stage))
    if world > 1:
        dist.all_reduce(square)
    scale = (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in stage.parameters():
        p.grad.mul_(scale)


@torch.no_grad()
def evaluate(stage, ids):
    x = ids[:, :-1] if first else receive((len(ids), SEQ, DIM), rank - 1)
    y = stage(x)
    result = torch.zeros(2)
    if last:
        result[0] = loss_of(y, ids[:, 1:])
        result[1] = (y.argmax(-1) == ids[:, 1:]).sum() / ids[:, 1:].numel()
    else:
        dist.send(y, rank + 1)
    if world > 1:
        dist.broadcast(result, world - 1)
    return result.tolist()


stage = Stage()
optimizer = torch.optim.AdamW(stage.parameters(), lr=4e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=STEPS)
train, valid = sequences(1, 320), sequences(2, 75)
shuffle = torch.Generator().manual_seed(3)
step = 0
while step < STEPS:
    for rows in torch.randperm(len(train), generator=shuffle).split(BATCH):
        loss = forward_backward(stage, train[rows])
        if world > 1:
            if first or last:
                dist.all_reduce(stage.table.weight.grad, group=ends)
            dist.broadcast(loss, world - 1)
        clip(stage)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        step += 1
    valid_loss, accuracy = evaluate(stage, valid)
    if rank == 0:
        print(f"step {step} loss {loss.item():.5f} valid {valid_loss:.5f} accuracy {accuracy:.4f}")

norm = sum(p.detach().square().sum() for p in owned(stage))
if world > 1:
    dist.all_reduce(norm)
if rank == 0:
    print(f"weight norm {norm.sqrt().item():.5f}")
if world > 1:
    dist.destroy_process_group()
