"""Fewer bytes for gradients: codecs, and the mean of the ranks' gradients in compressed messages.

A codec is given to `samestep.replicate(model, world, compress=…)`, by name or as a value with settings:

    "fp16"   "bf16"   "int8"   "sign"   "topk"   "powersgd"          Int8(block=256, rounding="nearest")
"""

from __future__ import annotations

from samestep.compress.codecs import BFloat16, Codec, Float16, Int8, Sign
from samestep.compress.powersgd import PowerSGD
from samestep.compress.topk import TopK
from samestep.errors import UsageError

__all__ = ["BFloat16", "Codec", "Float16", "Int8", "PowerSGD", "Sign", "TopK", "named"]

CODEC_NAMES: dict[str, type[Codec]] = {
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
    "sign": Sign,
    "topk": TopK,
    "powersgd": PowerSGD,
}


def named(codec: str | Codec) -> Codec:
    """Returns a codec by its name, with its usual settings; a codec as it is.

    Raises:
        UsageError: there is none of that name.

    Example:
        >>> named("int8").block
        512
    """
    if isinstance(codec, Codec):
        return codec
    kind = CODEC_NAMES.get(codec) if isinstance(codec, str) else None
    if kind is None:
        raise UsageError(
            f"compress={codec!r} is no codec: use {', '.join(map(repr, CODEC_NAMES))}, or one of samestep.compress "
            "with settings, as Int8(block=256)"
        )
    return kind()
