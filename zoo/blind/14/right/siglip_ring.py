"""Pictures and captions with the sigmoid loss (SigLIP), captions passed round a ring.

Each process keeps its pictures and sees the captions of the others one neighbour after
the other (isend / irecv with a gradient that travels back), so nobody holds the whole
matrix of the batch. DDP, DistributedSampler, AdamW; recall@1 over all test pairs.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WORDS, LENGTH, PIXELS, DIM, BATCH, EPOCHS = 60, 6, 40, 24, 64, 4


class Pairs(Dataset):
    def __init__(self, n, seed):
        g, world_g = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
        looks, scores = torch.randn(8, PIXELS, generator=world_g), torch.randn(8, WORDS, generator=world_g)
        things = torch.randn(n, 8, generator=g)
        self.pictures = torch.tanh(things @ looks / 2) + 0.2 * torch.randn(n, PIXELS, generator=g)
        self.captions = torch.multinomial((things @ scores).softmax(1), LENGTH, generator=g)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.pictures[i], self.captions[i]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(PIXELS, 64), nn.GELU(), nn.Linear(64, DIM))
        self.words, self.caption = nn.Embedding(WORDS, 32), nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, DIM))
        self.scale, self.bias = nn.Parameter(torch.tensor(math.log(5.0))), nn.Parameter(torch.tensor(-3.0))

    def forward(self, pictures, captions):
        return (F.normalize(self.picture(pictures), dim=1), F.normalize(self.caption(self.words(captions).mean(1)), dim=1),
                self.scale.exp(), self.bias)


def swap(tensor, to, frm):
    tensor = tensor.contiguous()
    result = torch.empty_like(tensor)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to), dist.P2POp(dist.irecv, result, frm)]):
        work.wait()
    return result


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, captions, to, frm):
        ctx.to, ctx.frm = to, frm
        return swap(captions, to, frm)

    @staticmethod
    def backward(ctx, grad):
        return swap(grad, ctx.frm, ctx.to), None, None


def sigmoid_loss(pictures, captions, scale, bias, rank, world):
    """Sum over own pictures and all captions, by the number of own pictures."""
    n = len(pictures)
    same = 2 * torch.eye(n) - 1
    total = -F.logsigmoid(same * (scale * pictures @ captions.T + bias)).sum()
    for _ in range(world - 1):
        captions = Pass.apply(captions, (rank + 1) % world, (rank - 1) % world)
        total = total - F.logsigmoid(-(scale * pictures @ captions.T + bias)).sum()
    return total / n


@torch.no_grad()
def recall(net, data, rank, world):
    rows = torch.arange(rank, len(data), world)
    pictures, captions, _, _ = net(data.pictures[rows], data.captions[rows])
    parts = [None] * world if rank == 0 else None
    dist.gather_object((rows, pictures, captions), parts, dst=0)
    if rank == 0:
        rows, pictures, captions = (torch.cat(t) for t in zip(*parts))
        order = rows.argsort()
        return ((pictures[order] @ captions[order].T).argmax(1) == torch.arange(len(data))).float().mean().item()


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29629")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(rank)
    train, test = Pairs(640, 1), Pairs(101, 2)
    sampler = DistributedSampler(train, seed=8)
    loader = DataLoader(train, BATCH // world, sampler=sampler, drop_last=True)
    model = DDP(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95), weight_decay=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen = 0.0
        for pictures, captions in loader:
            loss = sigmoid_loss(*model(pictures, captions), rank, world)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += loss.item() / len(loader)
        seen = torch.tensor(seen, dtype=torch.float64)
        dist.reduce(seen, dst=0)
        found = recall(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {seen.item() / world:.4f}, recall@1 {found:.4f}, "
                  f"scale {model.module.scale.exp().item():.3f}, bias {model.module.bias.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
