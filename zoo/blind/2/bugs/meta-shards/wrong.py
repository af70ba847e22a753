"""Model built on the meta device, sharded, then filled with its initial values; small character model."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
VOCAB, DIM, CTX = 32, 32, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate, self.up = nn.Linear(CTX * DIM, 64, bias=False), nn.Linear(CTX * DIM, 64, bias=False)
        self.down = nn.Linear(64, CTX * DIM, bias=False)

    def forward(self, x):
        h = self.norm(x).flatten(1)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)).view_as(x)


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(CTX * DIM, VOCAB)

    def forward(self, idx):
        x = self.emb(idx)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x).flatten(1))


@torch.no_grad()
def init_weights(model, seed, std=0.05):
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        local = p.to_local()
        if "norm" in name and name.endswith("weight"):
            local.fill_(1.0)
        elif name.endswith("bias"):
            local.zero_()
        else:
            local.normal_(0.0, std, generator=gen)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = CharModel()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, seed=42)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    g = torch.Generator().manual_seed(2)
    text = torch.cumsum(torch.randint(0, 5, (4000,), generator=g), 0) % VOCAB
    for step in range(32):
        at = torch.randint(0, len(text) - CTX - 1, (64,), generator=g)[rank::world]
        x = text[at[:, None] + torch.arange(CTX)]
        loss = F.cross_entropy(model(x), text[at + CTX])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 8 == 7:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
