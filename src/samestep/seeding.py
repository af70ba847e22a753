"""One seed for a run, and from it a seed of its own for every purpose, rank and epoch: integers only, no torch.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): word k of a stream is mix(key + k·GOLDEN), whichever was drawn before.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd, so that all multiples differ


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns the seed of the stream with these names: 63 bits, the same on every machine and version.

    >>> derive_seed(0, "dropout", 1) == derive_seed(0, "dropout", 1)
    True
    >>> derive_seed(0, "dropout", 1) == derive_seed(1, "dropout", 0)
    False
    """
    text = "/".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def splitmix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection: every bit of the result depends on every bit of the word."""
    import numpy as np

    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
