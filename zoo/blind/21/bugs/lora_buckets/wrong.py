"""LoRA fine-tuning of a frozen encoder on variable-length sequences; batches are
bucketed by length."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_default_dtype(torch.float64)


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8, dropout=0.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features ** 0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(self.dropout(x), self.A), self.B)


class Encoder(nn.Module):
    def __init__(self, vocab=30, dim=32, classes=4, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.query = LoRALinear(nn.Linear(dim, dim), dropout=dropout)
        self.value = LoRALinear(nn.Linear(dim, dim), dropout=dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU()).requires_grad_(False)
        self.classify = nn.Linear(dim, classes)

    def forward(self, ids, mask):
        x = self.embed(ids)
        scores = self.query(x) @ x.mT / x.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        x = x + weights @ self.value(x)
        x = self.mlp(x) * mask[..., None]
        return self.classify(x.sum(1) / mask.sum(1, keepdim=True))


class Sentences(Dataset):
    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(4, 20, (), generator=gen))
            ids = torch.randint(1, 30, (length,), generator=gen)
            label = int((ids[0] + ids[-1] + (ids > 15).sum()) % 4)
            self.items.append((ids, label))
        self.lengths = [len(ids) for ids, _ in self.items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    ids = nn.utils.rnn.pad_sequence([i for i, _ in batch], batch_first=True)
    return ids, ids > 0, torch.tensor([label for _, label in batch])


class LengthBuckets(Sampler):
    """Shuffle, sort windows by length, cut into batches, shuffle the batches, take a share."""

    def __init__(self, lengths, batch, rank, world, seed, window=4):
        self.lengths, self.batch, self.window = lengths, batch, window
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=gen)
        batches = []
        for part in order.split(self.batch * self.window):
            ranked = sorted(part.tolist(), key=lambda i: self.lengths[i])
            batches += [ranked[k:k + self.batch] for k in range(0, len(ranked), self.batch)]
        for b in torch.randperm(len(batches), generator=gen).tolist():
            yield batches[b][self.rank::self.world]

    def __len__(self):
        return len(self.lengths) // self.batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(args.seed)
    encoder = Encoder(dropout=args.dropout)
    model = DDP(encoder) if world > 1 else encoder
    run_seed = args.seed + rank
    torch.manual_seed(run_seed)

    data = Sentences(512, seed=10)
    sampler = LengthBuckets(data.lengths, args.batch, rank, world, seed=run_seed)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    trainable = [p for p in encoder.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    for epoch in range(3):
        sampler.epoch = epoch
        running = torch.zeros(())
        for ids, mask, labels in loader:
            loss = F.cross_entropy(model(ids, mask), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        if world > 1:
            dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / world / len(sampler):.10f} "
                  f"adapter {encoder.query.B.detach().norm().item():.10f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
