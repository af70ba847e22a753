"""Real data, small: scikit-learn's digits as image files in class folders, and some modules of the library."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

TRAIN, VAL = 8, 3  # images of each class; 30 validation images divide by neither 4 nor 7


@pytest.fixture(scope="session")
def digit_folder(tmp_path_factory):
    """`train/<digit>/k.JPEG` and `val/<digit>/k.png`, ten classes."""
    root = tmp_path_factory.mktemp("digit images")
    bunch = load_digits()
    for digit in range(10):
        images = bunch.images[bunch.target == digit][: TRAIN + VAL]
        for number, pixels in enumerate(images):
            part, suffix = ("train", "JPEG") if number < TRAIN else ("val", "png")
            folder = root / part / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((pixels * 15).astype("uint8")).resize((40, 36))
            image.save(folder / f"{number}.{suffix}")
    return root


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """Two dozen short modules of the standard library, about 90,000 bytes."""
    folder = tmp_path_factory.mktemp("modules")
    library = Path(sysconfig.get_paths()["stdlib"])
    short = [path for path in sorted(library.glob("*.py")) if 2000 < path.stat().st_size < 6000]
    for path in short[:24]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(autouse=True)
def _torch_as_found():
    """A recipe run in this process sets the number of threads and the seeds; the next test must not see them."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    torch.backends.cudnn.benchmark = False
