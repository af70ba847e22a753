"""Music recommendation: shared song tower under DDP, listeners' vectors stay where the listener lives.

A listener belongs to one process; their row is stepped there with Adagrad of our own and never travels
during training. The rows are brought together once at the end.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LISTENERS, SONGS, TAGS, WIDTH = 90, 300, 12, 16
BATCH, STEPS, NEGATIVES = 120, 48, 4


def listening(seed=0):
    g = torch.Generator().manual_seed(seed)
    taste = torch.randn(LISTENERS, TAGS, generator=g)
    tags = (torch.rand(SONGS, TAGS, generator=g) < 0.25).float()
    score = taste @ tags.t() + torch.randn(LISTENERS, SONGS, generator=g)
    liked = score.topk(14, dim=1).indices
    return tags, liked[:, 1:], liked[:, 0]          # the best one is kept for the test


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.listeners = nn.Embedding(LISTENERS, WIDTH)
        self.song = nn.Sequential(nn.Linear(TAGS, 32), nn.GELU(), nn.Linear(32, WIDTH, bias=False))
        self.bias = nn.Embedding(SONGS, 1)
        nn.init.normal_(self.listeners.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, who, songs, tags):
        v = self.song(tags[songs])
        return (self.listeners(who)[:, None] * v).sum(-1) + self.bias(songs).squeeze(-1)


class RowAdagrad:
    def __init__(self, table, lr):
        self.table, self.lr = table, lr
        self.squares = torch.full((len(table), 1), 1e-3)

    @torch.no_grad()
    def step(self):
        g = self.table.grad
        rows = g.abs().sum(1).nonzero().squeeze(1)
        self.squares[rows] += g[rows].square().mean(1, keepdim=True)
        self.table[rows] -= self.lr * g[rows] / self.squares[rows].sqrt()
        self.table.grad = None


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    tags, liked, kept = listening()
    model = Recommender()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["listeners.weight"])
    ddp = DDP(model)
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if n != "listeners.weight"], lr=8e-3)
    rows_opt = RowAdagrad(model.listeners.weight, lr=0.1)
    home = torch.arange(LISTENERS) * 7 % 4 % world      # which process a listener lives on

    draw = torch.Generator().manual_seed(77)
    for step in range(STEPS):
        who = torch.randint(LISTENERS, (BATCH,), generator=draw)
        pick = torch.randint(liked.shape[1], (BATCH,), generator=draw)
        wrong = torch.randint(SONGS, (BATCH, NEGATIVES), generator=draw)
        mine = (home[who] == rank).nonzero().squeeze(1)
        songs = torch.cat([liked[who[mine], pick[mine]][:, None], wrong[mine]], 1)
        scores = ddp(who[mine], songs, tags)
        loss = F.softplus(scores[:, 1:] - scores[:, :1]).sum() / (BATCH * NEGATIVES)
        dense.zero_grad()
        loss.backward()
        with torch.no_grad():                           # DDP gives the mean over processes, we want the sum
            for p in dense.param_groups[0]["params"]:
                p.grad *= world
        rows_opt.step()
        dense.step()
        if step % 12 == 11:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step + 1} loss {value.item():.5f}")

    with torch.no_grad():
        here = (home == rank).nonzero().squeeze(1)
        every = torch.arange(SONGS).expand(len(here), SONGS)
        ranks = ddp.module(here, every, tags)
        place = (ranks > ranks.gather(1, kept[here, None])).sum(1)
        result = torch.tensor([(place < 20).sum(), (1.0 / (place + 1)).sum(), len(here)], dtype=torch.float64)
        model.listeners.weight[home != rank] = 0.0
        dist.all_reduce(model.listeners.weight.data)    # one table again
    dist.all_reduce(result)
    if rank == 0:
        print(f"recall@20 {result[0] / result[2]:.4f} mrr {result[1] / result[2]:.4f}")
        print(f"listeners {model.listeners.weight.norm().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
