"""Benchmarks on small networks: their tests are of what they do, not of how long it takes."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from samestep.bench import workloads

WIDTHS = (512, 64, 48, 512)  # of the mlp: 61,040 parameters


def wide():
    """Returns a network of two layers, with the inputs and outputs of the wide one."""
    return nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1024))


def small(function, args=(), module=None, **constants):
    """Calls a function on a rank, with small networks and other constants of its module, or of a benchmark's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "WIDTHS", WIDTHS)
        patch.setattr(workloads, "_wide", wide)
        for name, value in constants.items():
            patch.setattr(module or sys.modules[function.__module__], name, value)
        return function(*args)


def in_place_of_spawn(ranks, **constants):
    """Returns what runs a function as `samestep.spawn` does, on ranks that are there already and small networks."""

    def run(function, n, *args, progress=False):
        assert n == ranks.size
        return ranks(lambda: small(function, args, **constants))

    return run
