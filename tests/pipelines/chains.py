"""Chains of layers drawn at random, and every way to cut one."""

from __future__ import annotations

import itertools

from samestep.pipelines.layers import Layer


def chain(chance, count):
    return [
        Layer(str(number), *(chance.lognormvariate(0, 1) for _ in range(3)), *(chance.random() for _ in range(3)))
        for number in range(count)
    ]


def every_cut(count, stages):
    return [(*inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]
