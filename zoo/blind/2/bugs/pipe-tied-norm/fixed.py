"""Language model cut into one stage per rank, GPipe order, word embedding shared by the first and the last stage."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
VOCAB, DIM, CTX, LAYERS, MICRO, BATCH = 48, 24, 12, 4, 4, 16


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.out(F.gelu(self.conv(h)).transpose(1, 2))


class Stage(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.first, self.last = rank == 0, rank == world - 1
        word = nn.Parameter(torch.randn(VOCAB, DIM) * 0.5)
        layers = [Mixer() for _ in range(LAYERS)]
        per = LAYERS // world
        self.layers = nn.ModuleList(layers[rank * per:(rank + 1) * per])
        if self.first or self.last:
            self.word = word
        if self.last:
            self.final = nn.LayerNorm(DIM)

    def forward(self, x):
        if self.first:
            x = F.embedding(x, self.word)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.final(x), self.word) if self.last else x


def run_step(stage, rank, ids, targets):
    inputs, outputs, total = [], [], torch.zeros(())
    for m, (xb, yb) in enumerate(zip(ids.chunk(MICRO), targets.chunk(MICRO))):
        if not stage.first:
            xb = torch.empty(BATCH // MICRO, CTX, DIM)
            dist.recv(xb, rank - 1)
            xb.requires_grad_()
        out = stage(xb)
        if stage.last:
            out = F.cross_entropy(out.flatten(0, 1), yb.flatten()) / MICRO
            total += out.detach()
        else:
            dist.send(out.detach(), rank + 1)
        inputs.append(xb)
        outputs.append(out)
    for xb, out in zip(reversed(inputs), reversed(outputs)):
        grad = None
        if not stage.last:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
        out.backward(grad)
        if not stage.first:
            dist.send(xb.grad, rank - 1)
    return total


def clip(stage, limit):
    own = [p for n, p in stage.named_parameters() if n != "word" or stage.first]
    sq = sum(p.grad.pow(2).sum() for p in own)
    dist.all_reduce(sq)
    norm = sq.sqrt()
    for p in stage.parameters():
        p.grad.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ends = dist.new_group([0, world - 1]) if world > 1 else None
    torch.manual_seed(31)
    stage = Stage(rank, world)
    opt = torch.optim.SGD(stage.parameters(), lr=0.4, momentum=0.9)
    gen = torch.Generator().manual_seed(8)
    rule = torch.randperm(VOCAB, generator=gen)
    for step in range(24):
        seq = [torch.randint(0, VOCAB, (BATCH,), generator=gen)]
        for _ in range(CTX):
            seq.append(rule[seq[-1]])
        seq = torch.stack(seq, 1)
        opt.zero_grad()
        loss = run_step(stage, rank, seq[:, :-1], seq[:, 1:])
        if ends is not None and (stage.first or stage.last):
            dist.all_reduce(stage.word.grad, group=ends)
        norm = clip(stage, 0.5)
        opt.step()
        if stage.last and step % 6 == 5:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
