"""What layers cost for micro-batches of any size, from those that were measured: t(b) = alpha + beta b.

measured     b = 6, 12, 24, 48        alpha: what kernels take to start, for however few samples
asked for    b = 20                   beta: what a sample takes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from samestep.errors import UsageError
from samestep.pipelines.layers import Layer

__all__: list[str] = []

_COSTS = [field.name for field in fields(Layer) if field.name != "name"]


def layers_at(sizes: Mapping[int, Sequence[Layer]], samples: float) -> list[Layer]:
    """Returns what layers cost for micro-batches of `samples`.

    Small sizes count as much as large ones: errors are relative to the size.

    Args:
        sizes: samples of a micro-batch -> the layers, as measured.
        samples: of the micro-batches that are asked for.

    Raises:
        UsageError: another size is asked for than the one that was measured.

    Example:
        >>> two = {10: [Layer("a", forward=3.0, inputs=1.0)], 20: [Layer("a", forward=5.0, inputs=1.0)]}
        >>> round(layers_at(two, 40)[0].forward, 6)
        9.0
    """
    if samples in sizes:
        return list(sizes[int(samples)])
    if len(sizes) < 2:
        raise UsageError(
            f"layers were measured for micro-batches of {next(iter(sizes))} samples alone, and {samples:g} are asked "
            "for: plan with micro_batches='auto'"
        )
    known = np.array(sorted(sizes), dtype=float)
    found = []
    for place, layer in enumerate(sizes[int(known[0])]):
        at = {}
        for name in _COSTS:
            measured = [getattr(sizes[int(size)][place], name) for size in known]
            beta, alpha = np.polyfit(known, measured, 1, w=1 / known)
            at[name] = max(0.0, float(alpha + beta * samples))
        found.append(Layer(layer.name, **at))
    return found
