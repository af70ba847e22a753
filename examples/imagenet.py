"""ImageNet's training with the official example's options, on pictures that everybody has: digits as JPEG files.

    digits/train/<class>/*.JPEG      the folders of ImageNet, with 10 classes for 1,000
    digits/val/<class>/*.JPEG

samestep run -n 2 examples/imagenet.py -a resnet18 -b 50 --epochs 1 --lr 0.01 --image-size 32 -j 0 --precision float64
python examples/imagenet.py -a resnet18 -b 50 --epochs 1 --lr 0.01 --image-size 32 -j 0 --precision float64

On the real one: `samestep run -m samestep.recipes.imagenet /data/imagenet -a resnet50 -b 1024`.

`samestep.once` lets one process make (or download) the folder while the others wait. What runs then is the recipe: the
options of PyTorch's imagenet/main.py, `-b` the images of a step on all ranks together, every image of val counted once,
whatever the number of ranks. Both commands print the same figures, in float64: in float32 a few steps of so deep a
network turn what sums in another order differ by, in the last digits, into the second.
"""

import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

import samestep
from samestep.recipes import imagenet

FOLDER, TRAINING, HELD_OUT = Path("digits"), 15, 7  # images of each class


def make(folder):
    """Writes every class's first images as training images, and some more to be measured on."""
    data = load_digits()
    for digit in range(10):
        own = data.images[data.target == digit][: TRAINING + HELD_OUT]
        for number, pixels in enumerate(own):
            place = folder / ("train" if number < TRAINING else "val") / str(digit)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15).astype("uint8")).resize((40, 40)).save(place / f"{number}.JPEG")


if __name__ == "__main__":
    with samestep.once(FOLDER) as mine:
        if mine:
            make(FOLDER)
    sys.exit(imagenet.main([str(FOLDER), *sys.argv[1:]]))
