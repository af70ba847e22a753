"""A small GPT: the decoder of Radford et al. 2019, in as many lines as it needs.

Pre-norm blocks, learned positions, `scaled_dot_product_attention` with its causal mask, and a head that shares its
weights with the token embedding (Press and Wolf, arXiv:1608.05859). No dropout: one pass over the text does not
overfit, and random masks would have to differ from rank to rank.

    symbols B x T  ->  embedding + position  B x T x width  ->  blocks  ->  scores B x T x symbols
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["GPT"]

SPREAD = 0.02  # standard deviation of fresh weights


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each B x heads x T x width/heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a two-layer perceptron four times as wide, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Symbols `B x T` (int64, T <= context) to scores `B x T x symbols` of the symbol that follows; B may be 0."""

    def __init__(self, symbols: int, *, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.context = context
        self.initialise(layers)

    def initialise(self, layers: int) -> None:
        """Small normal weights; those that add to the residual stream smaller still, the deeper the network."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            residual = name.endswith(("out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=SPREAD / math.sqrt(2 * layers) if residual else SPREAD)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Scores, not yet probabilities."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.blocks(self.embedding(symbols) + self.position(places))
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def continued(self, prompt: list[int], length: int, generator: torch.Generator) -> list[int]:
        """`length` symbols drawn one after another to follow `prompt`."""
        drawn = list(prompt)
        for _ in range(length):
            recent = torch.tensor([drawn[-self.context :]], device=self.embedding.weight.device)
            chances = self(recent)[0, -1].float().softmax(-1).cpu()
            drawn.append(int(torch.multinomial(chances, 1, generator=generator)))
        return drawn[len(prompt) :]
