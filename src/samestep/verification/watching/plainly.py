"""Takes out of a training what would make N processes and one differ though both are right: dropout and autocast.

Dropout draws other masks for other batch shapes; reduced precision hides what is to be seen (a mean of means in
bfloat16 lies below its rounding error). Recorded ranks and the script alone go without both, and the report says so.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any

from samestep.launch.imports import when_imported
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def without_chance(listener: Callbacks) -> None:
    """From now on, in this process; `listener` is told where something would have been dropped."""
    when_imported("torch.nn.functional", functools.partial(_without_dropout, listener))
    when_imported("torch.nn.modules.rnn", _without_recurrent_dropout)
    when_imported("torch.amp.autocast_mode", _without_autocast)
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", _without_mixed_precision)


def _without_dropout(listener: Callbacks, functional: ModuleType) -> None:
    for name in _DROPOUTS:
        setattr(functional, name, _identity(listener, getattr(functional, name)))
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        del dropout_p
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[attr-defined]


def _identity(listener: Callbacks, original: Any) -> Any:
    @functools.wraps(original)
    def dropout(input: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:  # noqa: A002
        import torch

        if p > 0 and training and not torch.compiler.is_compiling():
            listener.dropped()
        return input

    return dropout


def _without_recurrent_dropout(module: ModuleType) -> None:
    original = module.RNNBase.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        self.dropout = 0.0

    module.RNNBase.__init__ = __init__


def _without_autocast(module: ModuleType) -> None:
    original = module.autocast.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) > 2:
            args = (*args[:2], False, *args[3:])
        else:
            kwargs["enabled"] = False
        original(self, *args, **kwargs)

    module.autocast.__init__ = __init__


def _without_mixed_precision(module: ModuleType) -> None:
    """FullyShardedDataParallel's own autocast; it goes on casting what goes into a model, to the parameters' type."""
    original = module.FullyShardedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **kwargs).arguments
        if (policy := given.get("mixed_precision")) is not None:
            given["mixed_precision"] = _in_full(policy)
        original(**given)

    module.FullyShardedDataParallel.__init__ = __init__


def _in_full(policy: Any) -> Any:
    import torch

    kinds = ("param_dtype", "reduce_dtype", "buffer_dtype")
    full = {kind: torch.get_default_dtype() for kind in kinds if getattr(policy, kind) is not None}
    return dataclasses.replace(policy, **full, keep_low_precision_grads=False)
