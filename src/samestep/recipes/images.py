"""A folder of images as a dataset, `root/<class>/…/*.JPEG`, and the standard ImageNet views, with Pillow and torch.

Classes are the folders' names, sorted; images are sorted too, so that every machine with the same files has the same
index for the same picture. Every random choice of a sample comes from a generator of its own, seeded from (seed,
epoch, index): any rank and any worker make the same view.

Training: a random part of 8 to 100 % of the area, aspect ratio 3:4 to 4:3, resized to a square; mirrored half of
the time (Szegedy et al., arXiv:1409.4842). Validation: the shorter side becomes 256/224 of the size wanted, then
the centre. Both are normalised with ImageNet's channel means and standard deviations.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

import samestep

__all__ = ["DummyImages", "ImageFolder", "centre_view", "normalise", "random_view", "sample_generator", "train_and_val"]

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


SUFFIXES = (".jpeg", ".jpg", ".png")

Sample: TypeAlias = tuple[torch.Tensor, int]


class ImageFolder(Dataset[Sample]):
    """Samples `(image: float32 3 x size x size, class index)`.

    Args:
        root: a folder with one folder for each class.
        size: side of the square the network sees, in pixels.
        seed: training views, drawn from (seed, epoch, index); None for the fixed validation view.

    Raises:
        samestep.UsageError: there is no such folder, it has no class folders, or a class has no images; later,
            when a sample is read, an image that cannot be decoded.
    """

    def __init__(self, root: Path, *, size: int, seed: int | None = None) -> None:
        self.root, self.size, self.seed, self.epoch = root, size, seed, 0
        self.classes = class_names(root)
        found = [images_of(root / name) for name in self.classes]
        self.paths = [path for paths in found for path in paths]
        self.labels = [label for label, paths in enumerate(found) for _ in paths]

    def set_epoch(self, epoch: int) -> None:
        """The loader says which epoch it reads for; views change with it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        image = read_image(self.root / self.paths[index])
        if self.seed is None:
            view = centre_view(image, self.size)
        else:
            view = random_view(image, self.size, sample_generator(self.seed, self.epoch, index))
        return view, self.labels[index]


class DummyImages(Dataset[Sample]):
    """Synthetic samples of ImageNet's shape, drawn from (seed, index): for measuring without data."""

    def __init__(self, length: int, *, size: int, classes: int = 1000, seed: int = 0) -> None:
        self.length, self.size, self.seed = length, size, seed
        self.classes = [str(number) for number in range(classes)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        generator = sample_generator(self.seed, 0, index)
        image = torch.randn(3, self.size, self.size, generator=generator)
        return image, int(torch.randint(len(self.classes), (), generator=generator))


def train_and_val(data: Path, *, size: int, seed: int) -> tuple[ImageFolder, ImageFolder]:
    """`data/train` and `data/val`, which must hold the same classes."""
    if not data.is_dir():
        raise samestep.UsageError(f"no data folder at {data}: give the folder that holds train/ and val/")
    train = ImageFolder(data / "train", size=size, seed=seed)
    val = ImageFolder(data / "val", size=size)
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise samestep.UsageError(
            f"{data}/train has {len(train.classes)} classes and {data}/val has {len(val.classes)}; "
            f"only in one of them: {', '.join(odd[:5])}{' …' if len(odd) > 5 else ''}"
        )
    return train, val


def class_names(root: Path) -> list[str]:
    """The folders below `root`, sorted."""
    if not root.is_dir():
        raise samestep.UsageError(f"no folder {root}: images belong into {root}/<class>/*.JPEG")
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not names:
        raise samestep.UsageError(f"{root} holds no class folders: images belong into {root}/<class>/*.JPEG")
    return names


def images_of(folder: Path) -> list[str]:
    """Paths of a class's images relative to the data root, sorted; strings, because there may be millions."""
    found = sorted(
        os.path.relpath(os.path.join(where, name), folder.parent)  # noqa: PTH118  (Path is slow a million times)
        for where, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES)
    )
    if not found:
        raise samestep.UsageError(f"class folder {folder} holds no images ({', '.join(SUFFIXES)})")
    return found


def read_image(path: Path) -> Image.Image:
    """The picture in RGB, wholly decoded here, so that a broken file is known by its name."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        reason = str(error) if "<_io" not in str(error) else "not an image that Pillow knows"
        raise samestep.UsageError(f"cannot read image {path}: {reason}") from error
