"""Token tagging with a mixture of experts: the experts live on different processes, tokens travel by all-to-all."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

EXPERTS, DIM, VOCAB, TAGS, LENGTH = 4, 24, 40, 6, 10
BATCH, STEPS, BALANCE, MAX_NORM = 32, 80, 0.02, 1.0

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


def total(t):
    if WORLD > 1:
        dist.all_reduce(t)
    return t


class Exchange(torch.autograd.Function):
    """Rows to the ranks named by `send`, rows from them as counted by `receive`; gradients travel back."""

    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.counts = send, receive
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.counts
        out = grad.new_empty(sum(send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


class Expert(nn.Module):
    def __init__(self, number):
        super().__init__()
        g = torch.Generator().manual_seed(800 + number)
        self.up = nn.Parameter(torch.randn(DIM, 2 * DIM, generator=g) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(2 * DIM, DIM, generator=g) / (2 * DIM) ** 0.5)

    def forward(self, x):
        return F.gelu(x @ self.up) @ self.down


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.here = EXPERTS // WORLD
        self.experts = nn.ModuleList(Expert(RANK * self.here + k) for k in range(self.here))

    def forward(self, x):
        prob = self.router(x).softmax(-1)
        gate, choice = prob.max(-1)
        tally = total(torch.cat([torch.bincount(choice, minlength=EXPERTS), torch.tensor([len(x)])]))
        share = tally[:EXPERTS] / tally[EXPERTS]
        balance = EXPERTS * (share * prob.sum(0)).sum() / tally[EXPERTS]

        order = choice.argsort(stable=True)
        rows, kinds = x[order], choice[order]
        if WORLD > 1:
            send = torch.bincount(kinds // self.here, minlength=WORLD)
            receive = torch.empty_like(send)
            dist.all_to_all_single(receive, send)
            send, receive = send.tolist(), receive.tolist()
            rows = Exchange.apply(rows, send, receive)
            arrived = kinds.new_empty(sum(receive))
            dist.all_to_all_single(arrived, kinds, receive, send)
            kinds = arrived
        out = torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            mine = (kinds == RANK * self.here + k).nonzero().squeeze(1)
            out = out.index_copy(0, mine, expert(rows[mine]))
        if WORLD > 1:
            out = Exchange.apply(out, receive, send)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return out[back] * gate[:, None], balance


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE()
        self.out = nn.Linear(DIM, TAGS)

    def forward(self, tokens):
        h = self.embed(tokens)
        h = (h + F.relu(self.conv(h.transpose(1, 2)).transpose(1, 2))).flatten(0, 1)
        y, balance = self.moe(self.norm(h))
        return self.out(h + y), balance


def sentences(count, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (count, LENGTH), generator=g)
    before = torch.roll(tokens, 1, dims=1)
    return tokens, (tokens // 7 + (before > VOCAB // 2).long()) % TAGS


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(28)
    net = Tagger()
    owned = list(net.moe.experts.parameters())
    shared = [p for n, p in net.named_parameters() if "experts" not in n]
    opt = torch.optim.Adam(shared + owned, lr=5e-3)
    tokens, tags = sentences(1000, 1)
    test_tokens, test_tags = (t.tensor_split(WORLD)[RANK] for t in sentences(203, 2))
    picks = torch.Generator().manual_seed(29)
    log = torch.zeros(2)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(tokens), (BATCH,), generator=picks).chunk(WORLD)[RANK]
        logits, balance = net(tokens[rows])
        nll = F.cross_entropy(logits, tags[rows].flatten(), reduction="sum") / (BATCH * LENGTH)
        opt.zero_grad()
        (nll + BALANCE * balance).backward()
        for p in shared:
            total(p.grad)
        square = total(sum(p.grad.square().sum() for p in owned)) + sum(p.grad.square().sum() for p in shared)
        scale = (MAX_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for p in shared + owned:
            p.grad.mul_(scale)
        opt.step()
        log += torch.stack([nll.detach(), balance.detach()])
        if step % 20 == 0:
            mean = total(log) / 20
            with torch.no_grad():
                hits = total((net(test_tokens)[0].argmax(1) == test_tags.flatten()).sum()).item()
            if RANK == 0:
                print(f"step {step}: nll {mean[0]:.6f}  balance {mean[1]:.6f}  test accuracy {hits / (203 * LENGTH):.4f}")
            log.zero_()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
