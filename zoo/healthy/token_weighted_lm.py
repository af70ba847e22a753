"""A tiny GPT on padded sentences; the loss is divided by all ranks' tokens."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class GPTConfig:
    vocab_size, block_size, n_layer, n_head, n_embd = 32, 16, 2, 2, 32


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        y = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Sentences(Dataset):
    def __init__(self, n, config):
        g = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, config.vocab_size, (n, config.block_size + 1), generator=g)
        self.lengths = torch.randint(2, config.block_size + 1, (n,), generator=g)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        y = self.rows[i, 1:].clone()
        y[self.lengths[i] :] = -1
        return self.rows[i, :-1], y


class Trainer:
    def __init__(self, model, dataset, batch_size=8, lr=1e-3):
        self.model = DDP(model)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=batch_size, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                tokens = (y != -1).sum()
                dist.all_reduce(tokens)
                logits = self.model(x)
                total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum")
                loss = total * dist.get_world_size() / tokens
                self.model.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    config = GPTConfig()
    Trainer(GPT(config), Sentences(160, config)).run(epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
