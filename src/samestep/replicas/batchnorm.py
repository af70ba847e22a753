"""Batch normalisation over the batch of all ranks, exact, also on the CPU.

PyTorch's nn.SyncBatchNorm (Peng et al. 2017, "MegDet", arXiv:1711.07240) exists for accelerators only. This file
brings the same layer to CPU process groups. Its arithmetic differs: nn.SyncBatchNorm recovers the variance from
1/sqrt(var + eps), which loses digits where the variance is small beside eps. Here each rank keeps M2, the sum of
squared distances from its own mean, and parts are merged by the rule of Chan, Golub and LeVeque (1983, "Algorithms for
computing the sample variance: analysis and recommendations"):

    mean = sum(n_i mean_i) / n        M2 = sum(M2_i + n_i (mean_i - mean)**2)

For C channels the ranks gather [count, mean (C), M2 (C)] in forward and [sum dy (C), sum dy*xhat (C)] in backward, in
float64, and add them in rank order, so every rank holds the same bits. A rank without samples takes part with a count
of zero. Weight and bias gradients stay sums over the rank's own samples, because the gradient reduction adds them up.
The statistics are those of one micro-batch over all ranks: see docs/batchnorm.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase, _NormBase

from samestep.errors import DataError, ModelError
from samestep.runtime.axis import Axis


@dataclass(frozen=True)
class Moments:
    """Count of values per channel, their mean (C), and M2 (C): the sum of squared distances from the mean."""

    count: int
    mean: Tensor
    m2: Tensor


def local_moments(x: Tensor) -> Moments:
    """Moments of this rank's batch, float64 whatever the input; all zero for an empty batch.

    The mean is summed in float64 and the squares are taken after subtracting it. (PyTorch's own kernel for
    channels-last float32 sums naively: with a mean of 1e4 and 2e5 values its variance is off by a factor of 50.)
    """
    channels = x.size(1)
    count = x.numel() // channels if channels else 0
    if count == 0:
        nothing = torch.zeros(channels, dtype=torch.float64, device=x.device)
        return Moments(0, nothing, nothing)
    mean = x.sum(all_but_channels(x), dtype=torch.float64) / count
    x = x.to(accumulation_dtype(x.dtype))
    centred = x - per_channel(mean.to(x.dtype), x)
    return Moments(count, mean, centred.square_().sum(all_but_channels(x)).double())


def merge_moments(parts: list[Moments]) -> Moments:
    """Moments of the union of `parts`, added in the order given; parts may be empty."""
    count = sum(part.count for part in parts)
    total = torch.stack([part.mean * part.count for part in parts]).sum(0)
    mean = total / max(count, 1)
    spread = [part.m2 + part.count * (part.mean - mean).square() for part in parts]
    return Moments(count, mean, torch.stack(spread).sum(0))


def gather_moments(local: Moments, axis: Axis) -> Moments:
    """Moments of the batches of all ranks, the same bits on each. Collective: every rank must call."""
    row = torch.cat([local.mean.new_tensor([local.count]), local.mean, local.m2])
    channels = local.mean.numel()
    return merge_moments(
        [Moments(int(other[0]), other[1 : channels + 1], other[channels + 1 :]) for other in gather_rows(row, axis)]
    )


def gather_rows(row: Tensor, axis: Axis) -> list[Tensor]:
    """Every rank's row, in rank order; rows are equally long. Collective: every rank must call."""
    axis.check_open()
    rows = [torch.empty_like(row) for _ in range(axis.size)]
    dist.all_gather(rows, row, group=axis.group)
    return rows


def all_but_channels(x: Tensor) -> list[int]:
    """The dims of (n, C, ...) that a statistic of each channel runs over."""
    return [dim for dim in range(x.dim()) if dim != 1]


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """`values` (C) as (1, C, 1, ...), to be combined with `like` (n, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all that is narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
            rows = gather_rows(torch.cat([sum_dy, sum_dy_xhat]).double(), ctx.axis)
            means = torch.stack(rows).sum(0) / max(ctx.count, 1)
            mean_dy, mean_dy_xhat = means.to(sum_dy.dtype).tensor_split(2)
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
        if input.size(1) != self.num_features:
            raise DataError(
                f"batch normalisation over {self.num_features} channels got an input with {input.size(1)}: "
                f"shape {tuple(input.shape)}"
            )
        with torch.no_grad():
            moments = gather_moments(local_moments(input), self.axis)
            if moments.count == 1:
                raise DataError(
                    f"expected more than 1 value per channel when training, got 1 over all {self.axis.size} ranks; "
                    "take a larger batch, or call eval() on the layer"
                )
            self._track(moments)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, moments, self.eps, self.axis)  # type: ignore[no-untyped-call]
        return normalised

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
    """
    if axis.size == 1:
        return model
    # Look at all layers before changing one: an error leaves the model as it was.
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    layers = [(layer, _target_class(name, layer, device)) for name, layer in found]
    for layer, target in layers:
        layer.__class__ = target
        cast("SyncBatchNorm | DeviceSyncBatchNorm", layer).axis = axis
    return model


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


def running_statistics(model: nn.Module, *, own: bool = False) -> set[str]:
    """Returns the names of the buffers of normalisation layers; with `own` of those that are not synchronised."""
    return {
        name
        for prefix, layer in model.named_modules()
        if isinstance(layer, _NormBase) and not (own and isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm))
        for name, _ in layer.named_buffers(prefix, recurse=False)
    }
