"""Clipping by the global gradient norm, as one process with the whole batch would.

After the gradient reduction every rank holds the same gradients, so torch.nn.utils.clip_grad_norm_ on each gives the
same answer without communication. To clip on a micro-batch that does not end the step is an error here: gradients are
each rank's own until then, and every rank would scale by another factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from samestep.errors import StepError, UsageError
from samestep.replicas.replicate import Replica
from samestep.runtime.world import World

__all__ = ["clip_grad_norm_"]


@runtime_checkable
class _StagedModel(Protocol):
    """A model of which this rank has a part; :class:`samestep.Pipeline` is one."""

    world: World

    def gradient_norms(self, norm_type: float) -> list[Tensor]:
        """Returns the norm of each gradient of the whole model. Collective."""


def clip_grad_norm_(
    model: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients together so that their joint norm is at most `max_norm`; returns the norm before.

    The norm is that of the whole step's gradient, over all parameters as one vector; the same bits on every rank.
    No communication but for a pipeline, whose ranks tell each other the norms of their tensors: call it on every rank,
    between the backward that ends the step and the optimizer's step.

    Args:
        model: a replicated model, any module that holds one, a pipeline, a plain module, or parameters. From
            parameters alone the world is not known, so there the check below cannot be made.
        max_norm: the largest norm allowed, in the gradients' unit; must not be negative.
        norm_type: the p of the p-norm, `float("inf")` for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or infinite, as `torch.nn.utils.clip_grad_norm_` does.

    Returns:
        The norm before clipping, 0-dim, on the device of the first gradient; 0 without gradients.

    Raises:
        StepError: the last micro-batch does not end its step, so the gradients are not yet synchronised.
        UsageError: `max_norm` is negative or NaN.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> float(clip_grad_norm_(model, max_norm=1.0))
        5.0
        >>> round(float(model.weight.grad.norm()), 3)
        1.0

    In a training loop, and with a gradient scaler (fp16), whose factor must be taken off first::

        if batches.step_ends:
            scaler.unscale_(optimizer)
            samestep.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
    """
    if not max_norm >= 0:
        raise UsageError(f"max_norm must be 0 or more, got {max_norm}")
    staged = model if isinstance(model, _StagedModel) else None
    if isinstance(model, nn.Module):
        replicas = [one for one in model.modules() if isinstance(one, Replica)] if staged is None else [staged]
        if not all(one.world.step.step_ends for one in replicas):
            raise StepError(
                "clip_grad_norm_ was called after a micro-batch that does not end the step; "
                "gradients are each rank's own until then, and the ranks would scale by different factors. "
                "Clip inside `if batches.step_ends:`, before optimizer.step()"
            )
        model = model.parameters()
    parameters = [model] if isinstance(model, Tensor) else list(model)
    if staged is None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    else:
        gradients = staged.gradient_norms(norm_type)  # whose norms are themselves
    norm = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
