"""Models as people write them: no nn.Sequential, with functions, numbers, branches and parameters of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Convolutions(nn.Module):
    """A net of the tutorials: functions between layers, and a batch size that is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        count = x.size(0)
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.dropout(F.relu(self.conv2(x)), 0.3, training=self.training)
        return self.fc2(torch.tanh(self.fc1(x.view(count, -1))))


class Residual(nn.Module):
    """A block with a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.second(F.relu(self.first(self.norm(x))))


class Residuals(nn.Module):
    """Blocks in a list, a buffer, and a number from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 4, 3), nn.ModuleList(Residual(4) for _ in range(3))
        self.register_buffer("shift", torch.tensor(0.5))
        self.head, self.scale = nn.Linear(4, 5), 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x - self.shift)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))) * self.scale


class Attention(nn.Module):
    """A block of a language model, with a mask that all blocks are given."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.heads, self.p = heads, p

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.into(self.norm(x)).split(width, dim=2)
        q, k, v = (each.view(count, length, self.heads, width // self.heads).transpose(1, 2) for each in parts)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], dropout_p=p)
        x = x + self.out(y.transpose(1, 2).reshape(count, length, width))
        return x + self.mlp(x)


class Language(nn.Module):
    """Tokens and a mask in, two tensors out; it asks how long they are, and makes positions."""

    def __init__(self, p: float = 0.2, longest: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 8), nn.Parameter(torch.randn(longest, 8))
        self.blocks = nn.ModuleList(Attention(8, 2, p) for _ in range(2))
        self.norm, self.head, self.value, self.longest = nn.LayerNorm(8), nn.Linear(8, 20), nn.Linear(8, 1), longest

    def forward(self, tokens: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        length = tokens.size(1)
        if length > self.longest:
            raise ValueError("too long")
        x = self.tokens(tokens) + self.positions[torch.arange(length, device=tokens.device)]
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x) * scale
        return self.head(x), self.value(x).squeeze(-1)


class Tied(nn.Module):
    """Embeddings that are weights at the other end as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.tokens(tokens))))


class Deciding(nn.Module):
    """A block that looks at values: nobody can follow it, so it is one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if x.sum() > 0 else -x


class Around(nn.Module):
    """Blocks that decide, between layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(6, 6),
            nn.ModuleList(Deciding() for _ in range(2)),
            nn.Linear(6, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Library(nn.Module):
    """Layers of torch.nn that are blocks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


class Encoder(nn.Module):
    """The language model of the tutorials, with torch.nn's stack of layers and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.tokens, self.encoder, self.head = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.head(self.encoder(self.tokens(x) * math.sqrt(8), mask, is_causal=True))


class Translator(nn.Module):
    """An nn.Transformer, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.1, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.size(1))
        return self.head(self.transformer(self.tokens(x), self.tokens(y), tgt_mask=mask, tgt_is_causal=True))


IMAGES = (torch.linspace(0, 1, 6 * 81).sin().view(6, 1, 9, 9),)
TEXT = (torch.arange(30).view(6, 5) % 20, torch.arange(30).view(6, 5) % 7 > 0)
NUMBERS = (torch.linspace(-1, 1, 36).view(6, 6),)
MODELS = {
    "convolutions": (Convolutions, IMAGES, ["conv1", "conv2", "fc1", "fc2"]),
    "residuals": (
        Residuals,
        IMAGES,
        ["stem"] + [f"blocks.{n}.{part}" for n in range(3) for part in ("norm", "first", "second", "gain")] + ["head"],
    ),
    "language": (Language, TEXT, None),
    "tied": (Tied, TEXT[:1], ["tokens", "hidden", "head"]),
    "around": (Around, NUMBERS, ["first", "blocks.0", "blocks.1", "last"]),
    "encoder": (Encoder, TEXT[:1], ["tokens", "encoder.layers.0", "encoder.layers.1", "head"]),
    "translator": (
        Translator,
        (TEXT[0], TEXT[0].flip(1)),
        ["tokens", "tokens (2)"]
        + [
            f"transformer.{part}.{layer}"
            for part in ("encoder", "decoder")
            for layer in ("layers.0", "layers.1", "norm")
        ]
        + ["head"],
    ),
    "library": (Library, (torch.linspace(-1, 1, 240).view(6, 5, 8),), ["blocks.0", "blocks.1", "head"]),
}
