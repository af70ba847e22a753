"""Four small networks of some 5 million parameters, which compute unlike much per byte of gradient.

The mlp (512-2048-1536-512, 64 rows a rank) and the cnn (two convolutions before a large linear layer) compute little
for their 20 MB of gradients, the transformer (6 encoder layers of width 256, 8 rows of 32 tokens) several times more,
the wide one (six layers of 1024 x 1024, 16 rows) next to nothing for 25 MB.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from samestep.runtime.world import World

WIDTHS = (512, 2048, 1536, 512)  # of the mlp: 4,984,832 parameters
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    name: str  # "mlp", "cnn", "transformer" or "wide"
    batch: int  # samples a rank and step
    shape: tuple[int, ...]  # of a sample
    samples: int = 8192  # in the dataset
    classes: int = CLASSES

    def network(self) -> nn.Module:
        """Returns the network, always the same."""
        torch.manual_seed(0)
        return {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer, "wide": _wide}[self.name]()

    def dataset(self) -> Dataset[tuple[Tensor, ...]]:
        """Returns the data, always the same."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.samples, *self.shape, generator=generator)
        return TensorDataset(x, torch.randint(0, self.classes, (self.samples,), generator=generator))

    def batch_of(self, world: World) -> tuple[Tensor, Tensor]:
        """Returns a rank's first batch, on its device; where there are too many ranks, several have the same."""
        begin = self.batch * world.rank % self.samples
        x, y = (tensor.to(world.device) for tensor in self.dataset()[begin : begin + self.batch])
        return x, y


MLP = Workload("mlp", 64, (WIDTHS[0],), classes=WIDTHS[-1])
CNN = Workload("cnn", 64, (3, 32, 32), samples=4096)
TRANSFORMER = Workload("transformer", 8, (32, 256), samples=1024)
WIDE = Workload("wide", 16, (1024,), samples=1024, classes=1024)


def _mlp() -> nn.Module:
    layers = [layer for widths in itertools.pairwise(WIDTHS) for layer in (nn.Linear(*widths), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _wide() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 1192),
        nn.ReLU(),
        nn.Linear(1192, CLASSES),
    )


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(256 * 32, CLASSES))
