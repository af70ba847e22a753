"""Batch normalisation over the batch of all ranks, exact, also on CPU.

BatchNorm is the one common layer whose output for a sample depends on the other samples of the batch. Under
DistributedDataParallel each rank normalises by its own slice, so N ranks train another function than one
process does. PyTorch's cure, nn.SyncBatchNorm (Peng et al. 2017, "MegDet", arXiv:1711.07240), exists for
accelerators only: on CPU its forward raises. This file brings the same layer to CPU process groups.

What passes between the ranks, for C channels and N ranks, float64 whatever the input (C is small, and a count
above 2**24 is not a float32):

    forward    [count, mean (C), M2 (C)]         gathered; M2 is the sum of squared distances from the mean
    backward   [sum dy (C), sum dy*xhat (C)]     gathered; only where the input needs a gradient

Both are gathered and added in rank order rather than all-reduced, so every rank holds the same bits and one
process can repeat the sum exactly. `moments` has the arithmetic.

A rank without samples (dim 0 is 0) takes part with a count of zero. Weight and bias gradients stay sums over
the rank's own samples, as in nn.SyncBatchNorm, because the gradient reduction that follows adds them up.

With micro-batches the statistics are those of one micro-batch over all ranks, not of the whole step, and the
running statistics move once per micro-batch: the same as one process that accumulates over micro-batches as
large as the ranks' together. No exact layer can do otherwise without running the forward pass twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from samestep.errors import DataError, ModelError
from samestep.replicas.moments import (
    Moments,
    accumulation_dtype,
    all_but_channels,
    gather_moments,
    gather_rows,
    local_moments,
    per_channel,
)
from samestep.runtime.axes import Axis

__all__: list[str] = []


class _Normalise(torch.autograd.Function):
    """y = xhat * weight + bias with xhat = (x - mean) / sqrt(var + eps), mean and var over all ranks.

    Backward, with n values per channel over all ranks:

        dx = weight / sqrt(var + eps) * (dy - [sum dy] / n - xhat * [sum dy*xhat] / n)

    where [..] runs over all ranks, because every sample moved the mean and the variance of every other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Moments, eps: float, axis: Axis
    ) -> Tensor:
        work = accumulation_dtype(x.dtype)
        mean = moments.mean.to(work)
        var = (moments.m2 / max(moments.count, 1)).to(work)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.count, ctx.axis = eps, moments.count, axis
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _affine(x.to(work), mean, var, weight, bias, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        dy = dy.to(mean.dtype)
        xhat = _affine(x.to(mean.dtype), mean, var, None, None, ctx.eps)
        sum_dy = dy.sum(all_but_channels(x))
        sum_dy_xhat = (dy * xhat).sum(all_but_channels(x))
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            scale = (var + ctx.eps).rsqrt() if weight is None else weight.to(var) * (var + ctx.eps).rsqrt()
            mean_dy, mean_dy_xhat = _global_means(sum_dy, sum_dy_xhat, ctx.count, ctx.axis)
            dx = torch.addcmul(dy, xhat, per_channel(mean_dy_xhat, x), value=-1)
            dx = dx.sub_(per_channel(mean_dy, x)).mul_(per_channel(scale, x)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = sum_dy_xhat.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_dy.to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None


def _affine(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)


def _global_means(sum_dy: Tensor, sum_dy_xhat: Tensor, count: int, axis: Axis) -> tuple[Tensor, Tensor]:
    rows = gather_rows(torch.cat([sum_dy, sum_dy_xhat]).double(), axis)
    means = torch.stack(rows).sum(0) / max(count, 1)
    return means.to(sum_dy.dtype).tensor_split(2)  # type: ignore[return-value]


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the batches of all ranks of `axis`, for inputs (n, C) or (n, C, ...), n >= 0.

    Made from a BatchNorm layer by :func:`synchronise_batchnorm`. State dict, parameters and hyper-parameters
    are those of nn.BatchNorm. In training mode forward and backward are collective: every rank must call them
    the same number of times in the same order, with an empty batch where it has no samples. In eval mode it is
    nn.BatchNorm, without communication (also with track_running_stats=False, where it uses the rank's own
    batch, as nn.SyncBatchNorm does).

    Running statistics are equal on all ranks bit for bit; the running variance is the unbiased one of the
    global batch.

    Raises:
        DataError: (a ValueError, as in PyTorch) the ranks together hold one value per channel only.
    """

    axis: Axis

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  (the base class's name)
        if input.dim() < 2:
            raise DataError(
                f"batch normalisation needs an input of at least 2 dims (samples, channels), got {input.dim()}"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the base class's name)
        """Normalises (n, C, ...) by the statistics of all ranks' batches (training) or the running ones (eval)."""
        self._check_input_dim(input)
        if not self.training or self.axis.size == 1:
            return super().forward(input)
        self._check_channels(input)
        with torch.no_grad():
            moments = gather_moments(local_moments(input), self.axis)
            self._check_count(moments.count)
            self._track(moments)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, moments, self.eps, self.axis)  # type: ignore[no-untyped-call]
        return normalised

    def _check_channels(self, x: Tensor) -> None:
        if x.size(1) != self.num_features:
            raise DataError(
                f"batch normalisation over {self.num_features} channels got an input with {x.size(1)}: "
                f"shape {tuple(x.shape)}"
            )

    def _check_count(self, count: int) -> None:
        if count == 1:
            raise DataError(
                f"expected more than 1 value per channel when training, got 1 over all {self.axis.size} ranks; "
                "take a larger batch, or call eval() on the layer"
            )

    def _track(self, moments: Moments) -> None:
        if not self.track_running_stats:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / int(self.num_batches_tracked)
        if moments.count > 1:
            _move(self.running_mean, moments.mean, momentum or 0.0)
            _move(self.running_var, moments.m2 / (moments.count - 1), momentum or 0.0)


def _move(running: Tensor | None, towards: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(running.double() * (1 - momentum) + towards * momentum)


class DeviceSyncBatchNorm(nn.SyncBatchNorm):
    """nn.SyncBatchNorm over `axis`. It asks the axis for the group, so it can be copied and outlives the world."""

    axis: Axis

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """The group of the axis; None once the world is closed."""
        return self.axis.group


# One class per number of dims, each still an instance of what it replaces: code that looks for nn.BatchNorm2d (to
# leave it out of weight decay, say) goes on finding it, and the check of the input's dims stays the layer's own.


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """:class:`SyncBatchNorm` for (n, C) and (n, C, L)."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim  # noqa: SLF001


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """:class:`SyncBatchNorm` for (n, C, H, W)."""

    _check_input_dim = nn.BatchNorm2d._check_input_dim  # noqa: SLF001


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """:class:`SyncBatchNorm` for (n, C, D, H, W)."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim  # noqa: SLF001


def synchronise_batchnorm(model: nn.Module, axis: Axis, device: torch.device) -> nn.Module:
    """Turns every BatchNorm layer of `model` into one that normalises over all ranks of `axis`, in place.

    The layers change their class and keep everything else: parameters (optimizers made before stay valid),
    buffers, hooks, training flags, and being shared between several places of the model. On CUDA the class is
    nn.SyncBatchNorm, elsewhere :class:`SyncBatchNorm`. Layers that are already one of these are pointed at
    `axis`. On an axis of one rank nothing changes: there the plain layer is already exact.

    No communication. Returns `model`, which may itself be a BatchNorm layer.

    Raises:
        ModelError: a layer derived from BatchNorm has a forward of its own, or is lazy and not yet initialised.
    """
    if axis.size == 1:
        return model
    # Look at all layers before changing one: an error leaves the model as it was.
    layers = [(layer, _target_class(name, layer, device)) for name, layer in _batchnorms(model)]
    for layer, target in layers:
        layer.__class__ = target
        cast("SyncBatchNorm | DeviceSyncBatchNorm", layer).axis = axis
    return model


def _batchnorms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]


def _target_class(name: str, layer: _BatchNorm, device: torch.device) -> type[_BatchNorm]:
    kind, where = type(layer).__name__, f"layer {name!r}" if name else "the model itself"
    if isinstance(layer, _LazyNormBase):
        raise ModelError(
            f"{where} is a {kind} whose size is still unknown; run one batch through the model before replicating it"
        )
    known = isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm)
    if not known and type(layer).forward is not _BatchNorm.forward:
        raise ModelError(
            f"{where} is a {kind}, a BatchNorm with a forward of its own, which cannot be synchronised from outside; "
            "use a plain BatchNorm layer followed by the rest, or keep per-rank statistics with batchnorm='local'"
        )
    if device.type == "cuda":
        return DeviceSyncBatchNorm
    for plain, ours in _CLASSES.items():
        if isinstance(layer, plain):
            return ours
    return SyncBatchNorm


_CLASSES: dict[type[_BatchNorm], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
