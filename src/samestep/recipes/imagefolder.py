"""A folder of images as a dataset: `root/<class>/…/*.JPEG`, and errors that name the file.

torchvision's ImageFolder knows neither the epoch nor the index when it augments, and a broken picture ends it
with "cannot identify image file <_io.BufferedReader>", which names nothing. Classes are the folders' names,
sorted; images are sorted too, so that every machine with the same files has the same index for the same picture.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

import samestep
from samestep.recipes.augment import centre_view, random_view, sample_generator

__all__ = ["DummyImages", "ImageFolder", "train_and_val"]

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
