"""What one device does in a step, for any number of samples: read between the sizes that were measured.

    seconds
       │            ●     measured
       │       ○         asked for: on the line between its neighbours
       │   ●              below the smallest: its slope between the first two, never below 0
       └───────────── samples

Kernels need a while however few the samples are, so half a batch takes more than half the time; data parallel training
of one batch over more and more ranks pays that, and most predictions leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence

from samestep.planning.profile import Profile, Size

__all__: list[str] = []


def at(profile: Profile, samples: float, speed: float = 1.0) -> Size:
    """Returns forward and backward of `samples` on a device `speed` times as quick as the profiled one.

    Args:
        profile: of which the sizes serve, or in their absence the step itself, in proportion.
        samples: 0 or more; with none nothing is done.
        speed: of the device.

    Example:
        >>> sizes = (Size(8, 2.0, 4.0), Size(16, 3.0, 6.0))
        >>> _between(sizes, 12), _between(sizes, 4), _between(sizes, 32)
        ((2.5, 5.0), (1.5, 3.0), (5.0, 10.0))
    """
    if samples <= 0:
        return Size(0, 0.0, 0.0)
    forward, backward = _between(sorted(profile.sizes, key=lambda one: one.samples), samples) or (
        profile.forward_s * samples / profile.batch,
        profile.backward_s * samples / profile.batch,
    )
    return Size(round(samples), forward / speed, backward / speed)


def _between(sizes: Sequence[Size], samples: float) -> tuple[float, float] | None:
    """Forward and backward on the line through the two nearest sizes; None with fewer than two."""
    if len(sizes) < 2:
        return None
    below = max((n for n, one in enumerate(sizes[:-1]) if one.samples <= samples), default=0)
    one, other = sizes[below], sizes[below + 1]
    share = (samples - one.samples) / (other.samples - one.samples)
    forward = one.forward_s + share * (other.forward_s - one.forward_s)
    backward = one.backward_s + share * (other.backward_s - one.backward_s)
    return max(0.0, forward), max(0.0, backward)
