"""Next-character model, tensor parallel by hand (Megatron style).

Every process sees the *same* batch. The vocabulary (embedding and output layer) and
the hidden layer of the MLP are cut over the processes; cross entropy is computed on
the cut vocabulary without ever building the full logits."""
import os, time, math
import torch, torch.distributed as dist
import torch.nn as nn, torch.nn.functional as F

TEXT = ("the scribe cut the quill and ruled the vellum by candle light then wrote the long "
        "charter of the abbey in a small brown hand leaving wide margins for the painter ") * 12
ALPHABET = sorted(set(TEXT))
V = 32                      # padded so that it can be cut
D, H, CTX = 32, 96, 6


class CopyIn(torch.autograd.Function):           # identity, gradient summed
    @staticmethod
    def forward(ctx, x): return x
    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class SumOut(torch.autograd.Function):           # sum, gradient passed on as it is
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, g): return g


class Model(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        g = torch.Generator().manual_seed(8)
        init = lambda *s, scale: torch.randn(*s, generator=g) * scale
        cut = lambda t, dim: nn.Parameter(t.chunk(world, dim)[rank].clone())
        self.emb = cut(init(V, D, scale=0.3), 0)
        self.up = cut(init(H, D * CTX, scale=1 / math.sqrt(D * CTX)), 0)
        self.up_bias = cut(torch.zeros(H), 0)
        self.down = cut(init(D, H, scale=1 / math.sqrt(H)), 1)
        self.norm = nn.LayerNorm(D)
        self.head = cut(init(V, D, scale=0.2), 0)
        self.lo = rank * (V // world)

    def forward(self, ids, target):
        local = ids - self.lo
        inside = (local >= 0) & (local < len(self.emb))
        x = SumOut.apply(F.embedding(local.where(inside, torch.zeros_like(local)), self.emb) * inside[..., None])
        h = F.gelu(F.linear(CopyIn.apply(x.flatten(1)), self.up, self.up_bias))
        x = self.norm(SumOut.apply(F.linear(h, self.down)) + x[:, -1])
        logits = F.linear(CopyIn.apply(x), self.head)
        # vocabulary parallel cross entropy
        top = logits.detach().amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top[:, None]
        z = SumOut.apply(logits.exp().sum(1))
        t = target - self.lo
        mine = (t >= 0) & (t < len(self.head))
        hit = SumOut.apply(logits.gather(1, t.where(mine, torch.zeros_like(t))[:, None])[:, 0] * mine)
        return (z.log() - hit).mean()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = torch.tensor([ALPHABET.index(c) for c in TEXT])
    windows = ids.unfold(0, CTX + 1, 1)
    model = Model(rank, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40, eta_min=1e-3)
    gen = torch.Generator().manual_seed(0)
    for step in range(40):
        rows = windows[torch.randint(len(windows), (96,), generator=gen)]
        loss = model(rows[:, :-1], rows[:, -1])
        opt.zero_grad()
        loss.backward()
        # global norm: the cut tensors add over the processes, the LayerNorm counts once
        cut_sq = sum(p.grad.square().sum() for n, p in model.named_parameters() if not n.startswith("norm"))
        dist.all_reduce(cut_sq)
        norm = (cut_sq + sum(p.grad.square().sum() for p in model.norm.parameters())).sqrt()
        for p in model.parameters():
            p.grad.mul_((1.0 / norm).clamp(max=1.0))
        opt.step()
        sched.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.5f} gradient norm {norm.item():.4f}")
    full = {}
    for name, p in model.named_parameters():
        parts = [torch.empty_like(p) for _ in range(world)]
        dist.all_gather(parts, p.detach().contiguous())
        full[name] = parts[0] if name.startswith("norm") else torch.cat(parts, 1 if name == "down" else 0)
    if rank == 0:
        print("whole model:", ", ".join(f"{n} {tuple(t.shape)}" for n, t in full.items()), flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
