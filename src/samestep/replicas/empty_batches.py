"""Whether a model takes the empty batch of a rank without samples: tried at the first step, not met at an epoch's end.

A last step with fewer samples than ranks leaves some ranks an empty batch, and a model may refuse it: `view(0, -1)`
does. The trial is a forward of a copy that shares the parameters, without gradients, collectives or random numbers
that are missed later. Nothing is concluded where the copy does not take a single sample either.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.data.batches import first_samples
from samestep.errors import SamestepError
from samestep.runtime.rng import RngState

REFUSALS = (RuntimeError, IndexError, ValueError)  # how models refuse shapes


def refusal(module: nn.Module, error: Exception, where: str) -> str:
    return (
        f"{type(module).__name__} cannot take an empty batch ({str(error).splitlines()[0].rstrip('.')}), and {where}: "
        "write x.flatten(1) instead of x.view(x.size(0), -1), or leave the short step out with drop_last=True"
    )


def try_empty(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int, device: torch.device
) -> Exception | None:
    """Returns what a model raises for a batch without samples; None if it accepts one, or if that is not known.

    Args:
        module: the model.
        args: of its forward, for a batch of `samples` samples.
        kwargs: likewise.
        samples: the length of dim 0 of the tensors that hold a value for each sample.
        device: whose random numbers are kept.
    """
    batches = [first_samples((tuple(args), dict(kwargs)), count, samples) for count in (1, 0)]
    random = RngState.capture(device)
    try:
        trial = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
        for part in trial.modules():
            part._forward_hooks.clear()  # noqa: SLF001  (what they look at are the forwards of the training)
            part._forward_pre_hooks.clear()  # noqa: SLF001
            if isinstance(part, _BatchNorm):
                part.training = False  # its statistics are a collective
        with torch.no_grad():
            positional, named = batches[0]
            trial(*positional, **named)
            try:
                positional, named = batches[1]
                trial(*positional, **named)
            except REFUSALS as error:
                return None if isinstance(error, SamestepError) else error
    except Exception:  # noqa: BLE001  (a model that cannot be copied, or does not take one sample, is not judged)
        return None
    finally:
        random.restore()
    return None
