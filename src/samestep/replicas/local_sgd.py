"""Local SGD: ranks step separately, and average parameters every few steps instead of gradients every step.

For links so slow that one message a step is too much. It is another training, the more so the longer the interval and
the higher the learning rate. PyTorch's averager leaves the last steps unaveraged, so ranks end with parameters of their
own. Here every evaluation and every save averages first, parameters and optimizer state. The mean is added in float64
in the order of the ranks and rounded once: of equal float32 it is that number.

Sources: S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; T. Lin et al., "Don't Use Large
Mini-batches, Use Local SGD", ICLR 2020 (to change over late).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from samestep.errors import StepError
from samestep.launch.process import is_known_to_fail
from samestep.launch.rank.user_code import warn
from samestep.replicas.optimizer_steps import ModelStepCounter, add_step_listener, is_among
from samestep.replicas.reduction import ordered_sum
from samestep.runtime.axis import Axis
from samestep.runtime.world import World


class LocalSGDEngine:
    """The engine of a replica whose ranks step separately."""

    def __init__(self, module: nn.Module, world: World, every: int) -> None:
        self.module = module
        self.world = world
        self.every = every  # steps between two averages
        self.since = 0  # steps since the ranks were equal
        self.averages = 0  # how often they were averaged
        self._equal = self._state_equal = True
        self._steps = ModelStepCounter(keeps=True)
        add_step_listener(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.module(*args, **kwargs)
        self.world.step.averaged = self.world.step.averaged or self.world.step.step_ends
        return outputs

    def holds(self, optimizer: Optimizer) -> bool:
        return is_among(set(map(id, self.module.parameters())), optimizer)

    def note_step(self, optimizer: Optimizer, number: int) -> None:
        """An optimizer of this model, the `number`-th of all, has stepped. Collective: on every rank."""
        self._equal = self._state_equal = False  # also behind an average, where a second optimizer steps
        if self.world.data.closed or not self._steps.begins_with(optimizer, number):
            return
        if not self.world.step.step_ends:
            raise StepError(
                "an optimizer stepped in the middle of a step: put optimizer.step() and zero_grad() under `if "
                "batches.step_ends:`"
            )
        self.since += 1
        if self.since >= self.every:
            self.average()

    def average(self, *, state: bool = False) -> None:
        """Makes every rank's parameters their mean; nothing where they are equal. Collective: every rank must call it.

        With `state` optimizers' state too, as before a save; between two saves it is each rank's own.
        """
        tensors: list[Tensor] = [] if self._equal else list(self.module.parameters())
        if state and not self._state_equal:
            tensors += self._state()
        average(tensors, self.world.data)
        self.averages += not self._equal
        self.since, self._equal = 0, True
        self._state_equal = self._state_equal or state

    def _state(self) -> Iterable[Tensor]:
        for optimizer in self._steps.optimizers():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                state = optimizer.state.get(parameter, {})
                for value in (state[name] for name in sorted(state)):
                    if isinstance(value, Tensor) and value.dim() and (value.is_floating_point() or value.is_complex()):
                        yield value

    def release(self) -> None:
        """Warns where ranks end with parameters of their own, and nothing worse has happened."""
        if not self._equal and self.world.is_first and sys.exc_info()[0] is None and not is_known_to_fail():
            warn(
                f"the world closes {self.since} steps after the last average, and every rank keeps parameters of its "
                "own: call model.average() before, as samestep.evaluate and a save do"
            )


@torch.no_grad()
def average(tensors: Sequence[Tensor], axis: Axis) -> None:
    """Makes tensors their mean over the ranks, in place: the same bits on all. Collective: every rank must call it."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
        if not same or axis.size == 1:
            continue

        def add(shares: Sequence[Tensor], dtype: torch.dtype = dtype) -> Tensor:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            total = torch.zeros(shares[0].numel(), dtype=wide, device=shares[0].device)
            for share in shares:
                total += share
            return total.div_(axis.size).to(dtype)

        means = ordered_sum(axis, torch.cat([tensor.detach().reshape(-1) for tensor in same]), add)
        for tensor, mean in zip(same, means.split_with_sizes([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(mean.view(tensor.shape))
