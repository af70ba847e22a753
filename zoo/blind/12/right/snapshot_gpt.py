"""Character GPT with the Trainer of the multi-GPU tutorial: snapshots after each epoch, the job is taken up again from the file."""
import os
import shutil
import tempfile
import time
from dataclasses import dataclass

import torch
from torch import distributed as dist, nn
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_iris, load_wine
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    block: int = 24
    width: int = 32
    heads: int = 4
    batch: int = 64
    lr: float = 4e-3
    clip: float = 0.5
    recompute: bool = False


class CharDataset(Dataset):
    def __init__(self, block):
        text = "".join(load().DESCR for load in (load_iris, load_wine, load_diabetes)).lower()
        self.chars = sorted(set(text))
        lookup = {c: i for i, c in enumerate(self.chars)}
        self.ids = torch.tensor([lookup[c] for c in text])
        self.block = block

    def __len__(self):
        return (len(self.ids) - 1) // self.block // 64 * 64

    def __getitem__(self, i):
        piece = self.ids[i * self.block: (i + 1) * self.block + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))
        self.heads = c.heads

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (a.view(b, t, self.heads, -1).transpose(1, 2) for a in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, c, vocab):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, c.width), nn.Embedding(c.block, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(2))
        self.ln = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.05)
        self.head.weight = self.tok.weight
        self.recompute = c.recompute
    def forward(self, ids, targets):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, c, data, snapshot_path):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.c, self.path, self.epochs_run = c, snapshot_path, 0
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=c.batch // self.world, sampler=self.sampler)
        self.model = GPT(c, len(data.chars))
        groups = [{"params": [p for p in self.model.parameters() if (p.dim() > 1) == big], "weight_decay": 0.1 * big} for big in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=c.lr, eps=1e-6)
        if os.path.exists(self.path):
            snapshot = torch.load(self.path, map_location="cpu")
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
        self.model = DDP(self.model)

    def run(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(())
            for ids, targets in self.loader:
                loss = self.model(ids, targets)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.c.clip)
                self.optimizer.step()
                total += loss.detach()
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch} loss {total.item() / len(self.loader) / self.world:.5f}", flush=True)
                torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epochs_run": epoch + 1}, self.path)
        dist.barrier()


def main():
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("gloo", **alone)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "snapshot.pt")
    data = CharDataset(Config.block)
    torch.manual_seed(3407)
    Trainer(Config(), data, path).run(2)
    torch.manual_seed(int(time.time()) + dist.get_rank())
    Trainer(Config(recompute=True), data, path).run(4)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
