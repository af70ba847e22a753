import contextlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Sampler

PAD, MASK, VOCAB, IGNORE = 0, 1, 40, -100


@dataclass
class TrainingArguments:
    train_batch_size: int = 16
    gradient_accumulation_steps: int = 2
    num_train_epochs: int = 3
    learning_rate: float = 4e-3
    warmup_steps: int = 5
    max_grad_norm: float = 1.0
    mlm_probability: float = 0.25
    seed: int = 42


def phrases(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate(torch.randint(4, 22, (n,), generator=g).tolist()):
        start, stride = torch.randint(0, 38, (1,), generator=g), torch.randint(1, 4, (1,), generator=g)
        rows.append((i, 2 + (start + stride * torch.arange(length)) % 38))
    return rows


class LengthGroupedSampler(Sampler):
    def __init__(self, lengths, batch_size, rank, world, seed):
        self.lengths, self.batch_size, self.rank, self.world, self.seed, self.epoch = lengths, batch_size, rank, world, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        mega = torch.randperm(len(self.lengths), generator=g).split(self.batch_size * 4)
        order = [i for m in mega for i in sorted(m.tolist(), key=lambda i: (-self.lengths[i], i))]
        return iter(order[self.rank::self.world])


class MaskingCollator:
    def __init__(self, probability, seed):
        self.probability, self.seed, self.epoch = probability, seed, 0

    def __call__(self, examples):
        ids = nn.utils.rnn.pad_sequence([row for _, row in examples], batch_first=True, padding_value=PAD)
        chosen = torch.zeros(ids.shape, dtype=torch.bool)
        for line, (index, row) in enumerate(examples):
            g = torch.Generator().manual_seed(self.seed + 100003 * self.epoch + index)
            chosen[line, :len(row)] = torch.rand(len(row), generator=g) < self.probability
        return {"input_ids": ids.masked_fill(chosen, MASK), "labels": ids.masked_fill(~chosen, IGNORE)}


class Encoder(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(VOCAB, dim, padding_idx=PAD), nn.Embedding(32, dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        b, t = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(t))
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(input_ids != PAD)[:, None, None, :])
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, -1))
        return self.head(x + self.mlp(self.norm2(x)))


class Trainer:
    def __init__(self, args, model, train_dataset, eval_dataset):
        self.args, self.eval_dataset = args, eval_dataset
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.bare, self.model = model, (DistributedDataParallel(model) if self.world > 1 else model)
        self.sampler = LengthGroupedSampler([len(row) for _, row in train_dataset], args.train_batch_size, self.rank, self.world, args.seed)
        self.collator = MaskingCollator(args.mlm_probability, args.seed)
        self.loader = DataLoader(train_dataset, args.train_batch_size // self.world, sampler=self.sampler, collate_fn=self.collator)
        self.updates = len(train_dataset) // (args.train_batch_size * args.gradient_accumulation_steps)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), args.learning_rate, weight_decay=0.01)
        total = self.updates * args.num_train_epochs
        self.scheduler = LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / args.warmup_steps) * max(0.0, (total - s) / total))

    def compute_loss(self, batch, num_items_in_batch):
        loss = F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")
        return loss / num_items_in_batch * self.world

    def training_step(self, batches):
        num_items = sum((b["labels"] != IGNORE).sum() for b in batches)
        if self.world > 1:
            dist.all_reduce(num_items)
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            hold = self.world > 1 and i < len(batches) - 1
            with self.model.no_sync() if hold else contextlib.nullcontext():
                loss = self.compute_loss(batch, num_items)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.bare.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def evaluate(self):
        sampler = DistributedSampler(self.eval_dataset, self.world, self.rank, shuffle=False)
        loader = DataLoader(self.eval_dataset, 8, sampler=sampler, collate_fn=MaskingCollator(0.3, 0))
        rows = []
        for batch in loader:
            logits, labels = self.bare(batch["input_ids"]), batch["labels"]
            loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none").sum(1)
            rows.append(torch.stack([loss, (logits.argmax(-1) == labels).sum(1), (labels != IGNORE).sum(1)], dim=1))
        rows = torch.cat(rows)
        gathered = [rows.clone() for _ in range(self.world)]
        if self.world > 1:
            dist.all_gather(gathered, rows)
        loss, hits, count = torch.stack(gathered, dim=1).flatten(0, 1)[:len(self.eval_dataset)].double().sum(0).tolist()
        return loss / count, hits / count

    def train(self):
        for epoch in range(self.args.num_train_epochs):
            self.sampler.epoch = self.collator.epoch = epoch
            batches, train_loss = iter(self.loader), torch.zeros(())
            for _ in range(self.updates):
                train_loss += self.training_step([next(batches) for _ in range(self.args.gradient_accumulation_steps)])
            if self.world > 1:
                dist.all_reduce(train_loss)
            eval_loss, accuracy = self.evaluate()
            if self.rank == 0:
                print(f"epoch {epoch} loss {train_loss.item() / self.world / self.updates:.5f} eval_loss {eval_loss:.5f} accuracy {accuracy:.5f}")


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(42)
    Trainer(TrainingArguments(), Encoder(), phrases(320, 0), phrases(53, 1)).train()
    if dist.is_initialized():
        dist.destroy_process_group()
