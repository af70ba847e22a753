"""Reports random numbers that the script draws, also by libraries that it calls, and switches off dropout and autocast.

Dropout draws other masks for other batch shapes; reduced precision hides what is to be seen (a mean of means in
bfloat16 lies below its rounding error). Recorded ranks and the script alone run without both, and the report says so.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from types import FrameType
from typing import Any

from samestep.instrument.callbacks import call, listeners
from samestep.instrument.patch import Group, call_site, caller, is_own, is_traced, on_undo
from samestep.rankenv import variable

draws = Group()  # reports random numbers that the script's own lines draw, or libraries for them
without_dropout_and_autocast = Group()  # switches both off, also in compiled code; reports what would be dropped

DRAWS = {
    "torch": (
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"),
        *("rand_like", "randn_like", "randint_like", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
    ),
    "numpy.random": (
        *("rand", "randn", "randint", "random", "uniform", "normal", "beta", "permutation", "choice"),
        "standard_normal",
    ),
    "random": ("random", "uniform", "randint", "choice", "betavariate", "gauss", "sample", "randrange"),
}
_DRAWN_BY_TENSORS = (
    *("bernoulli", "multinomial"),
    *("bernoulli_", "normal_", "uniform_", "exponential_", "random_", "geometric_", "log_normal_", "cauchy_"),
)
_CALLED_THROUGH = (
    *("torch.distributions", "torch.nn.init", "torch.nn.modules", "torch.nn.parallel", "torch.nn.functional"),
    *("torch.utils._contextlib", "torch.utils.checkpoint"),
)
_FOR_THEMSELVES = ("torch", "numpy", "random", "samestep")  # draw to order samples, say
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


def _draw(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    return _reported(name, original(*args, **kwargs), own_generator=kwargs.get("generator") is not None)


def _draw_in_place(name: str, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    original(self, *args, **kwargs)
    if type(self) is torch.Tensor and not self.is_meta:
        value = _reported(name, self, own_generator=kwargs.get("generator") is not None)
        if value is not self:
            with torch.no_grad():
                self.copy_(value)
    return self


def _reported(name: str, value: Any, *, own_generator: bool) -> Any:
    """Returns what the listeners make of numbers that are drawn for the script, or these."""
    frame: FrameType | None = caller()
    library = ""
    while frame is not None and not is_own(frame.f_code.co_filename):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_CALLED_THROUGH):
            package = module.partition(".")[0]
            if package in _FOR_THEMSELVES:
                return value
            library = library or f"{package}: "
        frame = frame.f_back
    if frame is not None:
        for one in listeners("on_random"):
            value = one.on_random(f"{library}{name}", call_site(frame), value, own_generator=own_generator)
    return value


for _family, _names in DRAWS.items():
    for _name in _names:
        draws.patch(_family, _name)(functools.partial(_draw, f"{_family}.{_name}"))
for _name in _DRAWN_BY_TENSORS:
    _drawing = _draw_in_place if _name.endswith("_") else _draw
    draws.patch("torch", f"Tensor.{_name}")(functools.partial(_drawing, f"torch.Tensor.{_name}"))


@draws.patch("numpy.random", "default_rng")
@draws.patch("random", "Random.seed")
def _seed(original: Any, *args: Any, **kwargs: Any) -> Any:
    _report_seed([one for one in (*args, *kwargs.values()) if not isinstance(one, random.Random)])
    return original(*args, **kwargs)


def _report_seed(seeds: list[Any]) -> None:
    frame: FrameType | None = caller()
    if frame is not None and frame.f_globals.get("__name__") == "random":  # a new generator seeds itself
        frame = frame.f_back
    if frame is not None and is_own(frame.f_code.co_filename):
        call("on_seed", repr(seeds) if seeds and seeds != [None] else f"unknown to rank {variable('RANK')}")


@draws.on_import("numpy.random")
def _watch_random_states(module: Any) -> None:
    """A class of C, whose constructor cannot be replaced: a subclass takes its place, which stands for all of them."""
    known = module.RandomState

    class Kind(type(known)):  # type: ignore[misc]
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, known)

    class RandomState(known, metaclass=Kind):  # type: ignore[misc, valid-type]
        def __init__(self, seed: Any = None) -> None:
            super().__init__(seed)
            _report_seed([seed])

    module.RandomState = RandomState
    on_undo(functools.partial(setattr, module, "RandomState", known))


@without_dropout_and_autocast.patch("torch.nn.functional", *_DROPOUTS, compiled=True)
def _dropout(original: Any, input: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:  # noqa: A002
    del original
    if p > 0 and training and not is_traced():
        call("on_dropout", input)
    return input


@without_dropout_and_autocast.patch("torch.nn.functional", "scaled_dot_product_attention", compiled=True)
def _attention(
    original: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kw: Any,
) -> Any:
    del dropout_p
    return original(query, key, value, attn_mask, 0.0, *args, **kw)


@without_dropout_and_autocast.patch("torch.nn.functional", "rrelu", compiled=True)
def _rrelu(
    original: Any,
    input: Any,  # noqa: A002
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    del training  # which draws a slope for each number
    return original(input, lower, upper, False, inplace)


@without_dropout_and_autocast.patch("torch.nn.modules.rnn", "RNNBase.__init__")
def _make_recurrent(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.dropout = 0.0


@without_dropout_and_autocast.patch("torch.amp.autocast_mode", "autocast.__init__", compiled=True)
def _make_autocast(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if len(args) > 2:
        args = (*args[:2], False, *args[3:])
    else:
        kwargs["enabled"] = False
    original(self, *args, **kwargs)


@without_dropout_and_autocast.patch(_FSDP, "FullyShardedDataParallel.__init__")
def _make_sharded(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """FullyShardedDataParallel's own autocast; it goes on casting what goes into a model, to the parameters' type."""
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if (policy := given.get("mixed_precision")) is not None:
        given["mixed_precision"] = in_full_precision(policy)
    original(given.pop("self"), **given)


def in_full_precision(policy: Any) -> Any:
    """Returns a MixedPrecision of FullyShardedDataParallel in torch's default type, where it names one at all."""
    import torch

    kinds = ("param_dtype", "reduce_dtype", "buffer_dtype")
    full = {kind: torch.get_default_dtype() for kind in kinds if getattr(policy, kind) is not None}
    return dataclasses.replace(policy, **full, keep_low_precision_grads=False)
