"""Local SGD: ranks step by themselves, and average their parameters every few steps instead of gradients every step.

    rank 0   step step step step ┐                step step step step ┐
    rank 1   step step step step ┴ mean of both   step step step step ┴ mean of both     every 4 steps

For links so slow that one message a step is too much: a k-th of the bytes, and of the waiting. It is another training,
the more so the larger k and the learning rate; usual is to begin without and change over when the rate falls.

PyTorch's averager leaves the last steps unaveraged, so ranks end with parameters of their own, and whoever saves saves
one rank's. Here every evaluation and every save averages first, parameters and optimizer state, so that what is
evaluated is what is saved, on all ranks the same bits. The mean is added in float64 in the order of the ranks and
rounded once: of equal float32 it is that number.

Sources: S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; T. Lin et al., "Don't Use Large
Mini-batches, Use Local SGD", ICLR 2020 (to change over late).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from samestep.errors import StepError
from samestep.launch.process import is_known_to_fail
from samestep.launch.warning import warn
from samestep.replicas.rounds import Rounds, is_among, watch_steps
from samestep.runtime.axes import Axis
from samestep.runtime.world import World

__all__: list[str] = []


class LocalSteps:
    """The engine of a replica whose ranks step by themselves.

    Args:
        module: the bare model, alike on all ranks.
        world: whose data axis averages.
        every: steps between two averages.

    Attributes:
        every: likewise.
        since: steps since ranks were alike.
        averages: how often they were averaged.
    """

    def __init__(self, module: nn.Module, world: World, every: int) -> None:
        self.module = module
        self.world = world
        self.every = every
        self.since = self.averages = 0
        self._are_alike = self._state_is_alike = True
        self._rounds = Rounds(keeps=True)
        watch_steps(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns."""
        outputs = self.module(*args, **kwargs)
        self.world.step.averaged = self.world.step.averaged or self.world.step.step_ends
        return outputs

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has parameters of this model."""
        return is_among(set(map(id, self.module.parameters())), optimizer)

    def note_step(self, optimizer: Optimizer, number: int) -> None:
        """An optimizer of this model, the `number`-th of all, has stepped. Collective: on every rank."""
        self._are_alike = self._state_is_alike = False  # also behind an average, where a second optimizer steps
        if self.world.data.closed or not self._rounds.begins_with(optimizer, number):
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
        """Makes every rank's parameters their mean; nothing where they are alike. Collective: every rank must call it.

        Args:
            state: optimizers' state too, as before a save; between two saves it is each rank's own.
        """
        tensors: list[Tensor] = [] if self._are_alike else list(self.module.parameters())
        if state and not self._state_is_alike:
            tensors += self._state()
        average(tensors, self.world.data)
        self.averages += not self._are_alike
        self.since, self._are_alike = 0, True
        self._state_is_alike = self._state_is_alike or state

    def _state(self) -> Iterable[Tensor]:
        for optimizer in self._rounds.optimizers():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                kept = optimizer.state.get(parameter, {})
                for name in sorted(kept):
                    if isinstance(kept[name], Tensor) and kept[name].dim() and _has_mean(kept[name]):
                        yield kept[name]

    def release(self) -> None:
        """Says so where ranks part with parameters of their own, and nothing worse has happened."""
        if not self._are_alike and self.world.is_first and sys.exc_info()[0] is None and not is_known_to_fail():
            warn(
                f"the world closes {self.since} steps after the last average, and every rank keeps parameters of its "
                "own: call model.average() before, as samestep.evaluate and a save do"
            )


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def average(tensors: Sequence[Tensor], axis: Axis) -> None:
    """Makes tensors their mean over the ranks, in place: the same bits on all. Collective: every rank must call it.

    Every rank gets its share of all, adds it in float64 in the order of the ranks, and hands it round.
    """
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
        if not alike or axis.size == 1:
            continue
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        each = -(-flat.numel() // axis.size)
        padded = torch.nn.functional.pad(flat, (0, each * axis.size - flat.numel()))
        shares = torch.empty_like(padded)
        dist.all_to_all_single(shares, padded, group=axis.group)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        total = torch.zeros(each, dtype=wide, device=flat.device)
        for share in shares.view(axis.size, each):
            total += share
        mine = total.div_(axis.size).to(dtype)
        dist.all_gather(list(padded.view(axis.size, each).unbind()), mine, group=axis.group)
        for tensor, mean in zip(alike, flat_views(padded, alike), strict=True):
            tensor.copy_(mean)


def flat_views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors in `flat`, one after another, in the shapes of others."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].split_with_sizes(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
