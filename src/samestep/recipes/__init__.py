"""Trainings worth copying from: users of samestep's public names, and of nothing else.

    python -m samestep.recipes.digits          handwritten digits, seconds       (scikit-learn's own data)
    python -m samestep.recipes.text            a small GPT over bytes, minutes   (Python's standard library)
    python -m samestep.recipes.imagenet DIR    ResNet on image folders, days     (your data)
    python -m samestep.recipes.demo            what `make demo` shows

Each one trains the same whether `python -m`, `samestep run -n 4 -m` or `torchrun --nproc-per-node 4 -m` starts it.
"""

from __future__ import annotations
