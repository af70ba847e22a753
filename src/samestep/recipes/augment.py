"""The standard ImageNet views of a picture, made with Pillow and torch alone.

torchvision draws crops and flips from the global random stream of whichever worker happens to load the image, so
the picture a network sees depends on the number of ranks and workers. Here every random choice of a sample comes
from a generator of its own, seeded from (seed, epoch, index): any rank and any worker make the same view.

Training: a random part of 8 to 100 % of the area, aspect ratio 3:4 to 4:3, resized to a square; mirrored half of
the time (Szegedy et al., arXiv:1409.4842). Validation: the shorter side becomes 256/224 of the size wanted, then
the centre. Both are normalised with ImageNet's channel means and standard deviations.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image

__all__ = ["centre_view", "normalise", "random_view", "sample_generator"]

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
AREAS = (0.08, 1.0)
RATIOS = (3 / 4, 4 / 3)
ATTEMPTS = 10

Box: TypeAlias = tuple[float, float, float, float]


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """The random stream of one sample in one epoch, the same wherever it is loaded."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def random_view(image: Image.Image, size: int, generator: torch.Generator) -> torch.Tensor:
    """The training view: float32, 3 x size x size."""
    box = random_box(image.width, image.height, generator)
    view = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    if uniform(generator, 0, 1) < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return normalise(view)


def centre_view(image: Image.Image, size: int) -> torch.Tensor:
    """The validation view: float32, 3 x size x size."""
    scale = size * 256 / 224 / min(image.width, image.height)
    wide, high = max(size, round(image.width * scale)), max(size, round(image.height * scale))
    left, top = (wide - size) // 2, (high - size) // 2
    view = image.resize((wide, high), Image.Resampling.BILINEAR)
    return normalise(view.crop((left, top, left + size, top + size)))


def normalise(image: Image.Image) -> torch.Tensor:
    """Pixels 0..255 to float32, 3 x height x width, about zero mean and unit deviation."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)
    return (pixels.float() / 255 - MEAN) / DEVIATION


def random_box(width: int, height: int, generator: torch.Generator) -> Box:
    """(left, top, right, bottom) of a random part; the largest allowed centre where ten attempts do not fit."""
    for _ in range(ATTEMPTS):
        area = width * height * uniform(generator, *AREAS)
        ratio = math.exp(uniform(generator, math.log(RATIOS[0]), math.log(RATIOS[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = math.floor(uniform(generator, 0, width - wide + 1))
            top = math.floor(uniform(generator, 0, height - high + 1))
            return left, top, left + wide, top + high
    return centre_box(width, height)


def centre_box(width: int, height: int) -> Box:
    """The largest centred part whose aspect ratio is allowed."""
    ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
    wide, high = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    """A number in [low, high)."""
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))
